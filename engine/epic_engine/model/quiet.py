"""transformers' own progress bars, switched off while we load: callers show progress in their own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars from transformers inside; as it was afterwards."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
