"""What LlamaIndex would fetch lies in its package; and an engine to compare answers with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import llama_index.core
import pytest
from epic_engine import Engine

from tests.rag.stack import model, tokenizer

# Read when the first splitter is made. Without them llama-index-core 0.14.0 downloads what sentences are split with,
# though it ships it, and every version's worker processes download what tokens are counted with.
_DATA = Path(llama_index.core.__file__).parent / "_static"
os.environ.setdefault("NLTK_DATA", str(_DATA / "nltk_cache"))
os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(_DATA / "tiktoken_cache"))


@pytest.fixture(scope="session")
def oracle() -> Iterator[Engine]:
    """An engine of its own: nothing of ours lies between it and the token ids."""
    with Engine(model(), tokenizer=tokenizer(), selftest=False) as engine:
        yield engine
