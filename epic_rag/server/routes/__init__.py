"""Paths of the gateway, one module a group."""
