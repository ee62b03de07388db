"""Triton kernels, each beside the function that launches it; importing them needs Triton."""
