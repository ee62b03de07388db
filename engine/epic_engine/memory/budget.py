"""How much memory there is, and how much of it the KV may take, from what the user wrote."""

from __future__ import annotations

import re

from epic_engine.errors import ConfigError

__all__ = ["available_memory", "format_bytes", "parse_memory", "parse_size"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_memory(value: str | int | float | None, free: int, *, share: float = 0.5) -> int:
    """Bytes of a memory budget.

    Parameters
    ----------
    value
        ``"8GiB"``, ``"512MB"``, a number of bytes, a fraction of what is free (``0.6`` or ``"0.6"``), or None.
    free
        Bytes that are free now.
    share
        Fraction of ``free`` that None stands for.

    Returns
    -------
    int
        Bytes, at least 1 and at most ``free``.

    Raises
    ------
    ConfigError
        If the value cannot be read, is not positive, or exceeds what is free.
    """
    wanted = _bytes(share if value is None else value, free)
    if not 0 < wanted <= free:
        raise ConfigError(
            f"memory={value!r} stands for {format_bytes(wanted)}, {format_bytes(free)} are free: give at least one "
            'byte and at most that, or a fraction such as 0.5, or "8GiB".'
        )
    return wanted


def parse_size(text: str) -> int:
    """Bytes of a size.

    Parameters
    ----------
    text
        ``"8GiB"``, ``"512MB"`` or whole bytes.

    Raises
    ------
    ConfigError
        If it cannot be read, or is not positive.
    """
    parts = _number_and_unit(text)
    size = 0 if parts is None or (not parts[1] and "." in parts[0]) else _in_bytes(*parts)
    if size < 1:
        raise ConfigError(f'the size {text!r} cannot be read: write "8GiB", "512MB", or whole bytes, at least one.')
    return size


def _number_and_unit(text: str) -> tuple[str, str] | None:
    match = _TEXT.fullmatch(text)
    return (match[1], match[2].lower()) if match and match[2].lower() in _UNITS else None


def _in_bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit]) if "." in number else int(number) * _UNITS[unit]


def _bytes(value: str | int | float, free: int) -> int:
    if isinstance(value, str):
        parts = _number_and_unit(value)
        if parts is None:
            raise ConfigError(f'memory={value!r} cannot be read: write "8GiB", "512MB", bytes, or a fraction as 0.5.')
        if parts[1]:
            return _in_bytes(*parts)
        value = float(parts[0]) if "." in parts[0] else int(parts[0])
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigError(f"memory={value} is no fraction of what is free: use 0 < memory <= 1, or whole bytes.")
        return int(value * free)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'memory={value!r} cannot be read: write "8GiB", "512MB", bytes, or a fraction as 0.5.')
    return value


def format_bytes(count: int) -> str:
    """A number of bytes for people."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(count) >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} bytes"


def available_memory() -> int:
    """Bytes of memory that can be had without swapping; a large number where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
