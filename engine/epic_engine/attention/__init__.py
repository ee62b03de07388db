"""Attention over a linked prompt: one interface, one backend per kind of device."""
