"""A whole stack for tests in seconds: a tiny random model with a real tokenizer, and a bag-of-words embedder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epic_rag import ChunkingConfig, EpicRAG
from tests.engine.models import build
from tests.rag.tokenizers_for_tests import CHATML, byte_level

TEXTS = {
    "harbour": "The harbour master is Ines. " * 3 + "Boats pay nine crowns a night. The crane lifts four tonnes.",
    "bakery": "The bakery opens at six. Rye bread costs three crowns. The oven was built by Olaf in the spring.",
    "library": "The library lends books for a month. Late books cost nothing. The reading room is on the top floor.",
    "ferry": "The ferry leaves at noon and at dusk. " + "It carries forty people and six bicycles. " * 4,
}


class BagOfWords:
    """Hashes words into a vector; similar enough to an embedding to retrieve by shared words."""

    name = "bag of words"
    dim = 64

    def __init__(self) -> None:
        self.embedded = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of word counts."""
        self.embedded += len(texts)
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                out[row, hashlib.md5(word.encode()).digest()[0] % self.dim] += 1
        return out / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-9)


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """A byte-level tokenizer with ChatML control tokens."""
    return byte_level(CHATML)


@lru_cache(maxsize=4)
def model(dtype: torch.dtype = torch.float32, seed: int = 7) -> Any:
    """A tiny random Llama whose vocabulary is the tokenizer's."""
    made = build("Llama", {"vocab_size": len(tokenizer()), "max_position_embeddings": 2048}, dtype)
    if seed != 7:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def save_model(folder: Path) -> Path:
    """The tiny model and its tokenizer as a Hugging Face folder."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def open_rag(path: Path, **options: Any) -> EpicRAG:
    """An :class:`EpicRAG` on the tiny stack."""
    options = {"chunking": ChunkingConfig(max_tokens=24), "embedder": BagOfWords(), "context": "isolated", **options}
    return EpicRAG.open(path, options.pop("model", model()), tokenizer=tokenizer(), **options)
