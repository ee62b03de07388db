"""Laying compiled chunks out behind each other and choosing what is computed anew."""
