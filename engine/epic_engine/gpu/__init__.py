"""Checks of the Triton kernels: what they compile to without a GPU, and what they do on one."""
