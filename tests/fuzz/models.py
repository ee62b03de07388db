"""Models from files: configuration, weights and tokenizers in folders, and GGUF."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from epic_engine.model.gguf import load_gguf
from epic_engine.model.loader import load_model
from hypothesis import strategies as st

from tests.engine.models import tiny
from tests.engine.tokenizers_for_tests import TOKENIZERS

from .bounds import clean
from .damage import any_json, mutated, numbers
from .storage import folder

__all__ = ["PROPERTIES"]


@cache
def _model() -> dict[str, bytes]:
    with folder() as path:
        tiny("llama").save_pretrained(path)
        TOKENIZERS["byte-level"].save_pretrained(path)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def damaged_folder(data: st.DataObject) -> None:
    """A model is loaded whole, or refused."""
    files = dict(_model())
    name = data.draw(st.sampled_from(sorted(files)))
    if name == "config.json" and data.draw(st.booleans()):
        config = json.loads(files[name])
        field = data.draw(st.sampled_from(sorted(config)))
        files[name] = json.dumps(config | {field: data.draw(any_json() | numbers())}).encode()
    else:
        header = 8 + int.from_bytes(files["model.safetensors"][:8], "little")
        files[name] = mutated(data, files[name], before=data.draw(st.sampled_from((8, header))))
    with folder() as path:
        for own, raw in files.items():
            (path / own).write_bytes(raw)
        with clean():
            loaded, _, _ = load_model(path, device="cpu", dtype="float32")
            if files["model.safetensors"] == _model()["model.safetensors"]:
                written = dict(tiny("llama").named_parameters())
                assert all(torch.equal(p, written[n]) for n, p in loaded.named_parameters())


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(data: st.DataObject) -> bytes:
    kind = data.draw(st.sampled_from((*range(13), 14, 2**32 - 1)))
    if kind == 8:
        text = _text(data.draw(st.binary(max_size=8)))
        return struct.pack("<I", kind) + (text if data.draw(st.booleans()) else struct.pack("<Q", data.draw(numbers())))
    if kind == 9:
        inner, count = data.draw(st.sampled_from((0, 4, 8, 9, 12))), data.draw(numbers())
        return struct.pack("<IIQ", kind, inner, count) + data.draw(st.binary(max_size=40))
    return struct.pack("<IQ", kind, data.draw(numbers()))[: 4 + data.draw(st.sampled_from((1, 2, 4, 8)))]


def hostile_gguf(data: st.DataObject) -> None:
    """Counts, lengths and shapes of anything, right at the beginning of a file."""
    raw = data.draw(st.just(b"GGUF") | st.binary(max_size=4))
    raw += struct.pack("<I", data.draw(st.sampled_from((3, 2, 99))))
    raw += struct.pack("<QQ", data.draw(st.integers(0, 3) | numbers()), data.draw(st.integers(0, 4) | numbers()))
    raw += _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
    for _ in range(data.draw(st.integers(0, 3))):
        names = (b"general.alignment", b"llama.block_count", b"llama.embedding_length", b"tokenizer.ggml.tokens", b"x")
        raw += _text(data.draw(st.sampled_from(names))) + _value(data)
    for _ in range(data.draw(st.integers(0, 2))):
        dims = data.draw(st.lists(numbers(), max_size=5))
        raw += _text(b"token_embd.weight") + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
        raw += struct.pack("<IQ", data.draw(st.integers(0, 40)), data.draw(numbers()))
    with folder() as path, _cache_in(path):
        file = path / "model.gguf"
        file.write_bytes(raw + bytes(data.draw(st.integers(0, 200))))
        with clean():
            load_gguf(file, torch.float32)


@contextmanager
def _cache_in(path: Path) -> Iterator[Any]:
    with mock.patch.dict(os.environ, {"EPIC_RAG_CACHE": str(path / "cache")}):
        yield


PROPERTIES = {check.__name__: check for check in (damaged_folder, hostile_gguf)}
