"""What clients keep with chunks and documents."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, JsonValue

__all__ = ["LONGEST_METADATA", "Metadata", "PlainMetadata", "PlainText"]

LONGEST_METADATA = 16_384
"""Bytes of JSON."""


def _checked(metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        raise ValueError("must be JSON: without NaN, infinities and lone surrogates") from None
    if size > LONGEST_METADATA:
        raise ValueError(f"has {size} bytes of JSON, more than {LONGEST_METADATA}")
    return metadata


def _checked_strings(metadata: dict[str, str]) -> dict[str, str]:
    _checked(dict(metadata))
    return metadata


def _checked_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds lone surrogates, which are no text") from None
    return text


PlainText = Annotated[str, AfterValidator(_checked_text)]
"""A string that UTF-8 can hold."""

Metadata = Annotated[dict[str, JsonValue], AfterValidator(_checked)]
"""Any JSON object."""

PlainMetadata = Annotated[dict[str, str], AfterValidator(_checked_strings)]
"""A JSON object of strings."""
