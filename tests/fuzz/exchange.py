"""Chunks from elsewhere: exports, and stores that are read through a URL."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from epic_engine import ChunkInfo, FileStore, MemoryStore
from epic_engine.storage.exchange import export_chunks, import_chunks
from epic_engine.storage.publish import publish
from epic_engine.storage.remote import RemoteStore
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.test_store import entry

from .bounds import clean
from .damage import any_json, mutated, numbers
from .storage import folder

__all__ = ["PROPERTIES"]


def _entries() -> list[tuple[ChunkInfo, Tensor]]:
    made = [entry(number, namespace=namespace) for number in (1, 9) for namespace in ("one", "two")]
    return [(replace(info, context_ids=()), kv) for info, kv in made]  # whose keys are what they are made from


def _files(path: Path) -> dict[str, bytes]:
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def _laid(path: Path, files: dict[str, bytes]) -> None:
    for name, raw in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(raw)


@cache
def _export() -> dict[str, bytes]:
    with folder() as path:
        store = MemoryStore()
        store.put(_entries())
        export_chunks(store, path / "export", file_bytes=2500)
        return _files(path / "export")


@cache
def _published() -> dict[str, bytes]:
    with folder() as path:
        with closing(FileStore(path / "store")) as store:
            store.put(_entries())
            publish(store, (path / "remote").as_uri())
        return _files(path / "remote")


def _json_changed(data: st.DataObject, raw: bytes) -> bytes:
    """A JSON object one of whose values, at any depth, is another."""
    whole = json.loads(raw)
    at: Any = whole
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 3)) == 0:
            break
        at = at[key]
    old = at[key]
    if isinstance(old, str) and data.draw(st.booleans()):
        try:
            at[key] = _json_changed(data, old.encode()).decode()  # metadata are JSON within JSON
        except (ValueError, TypeError):
            at[key] = data.draw(st.text(max_size=5))
    else:
        at[key] = data.draw(any_json() | numbers())
    return json.dumps(whole).encode()


def _header_changed(data: st.DataObject, raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = _json_changed(data, raw[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def damaged_export(data: st.DataObject) -> None:
    """What is imported is what was exported, whole; nothing comes in under another key or namespace."""
    files = dict(_export())
    name = data.draw(st.sampled_from(sorted(files)))
    if data.draw(st.booleans()):
        changed = _json_changed if name.endswith(".json") else _header_changed
        files[name] = changed(data, files[name])
    else:
        files[name] = mutated(data, files[name], before=data.draw(st.sampled_from((8, 600))))
    wanted = data.draw(st.none() | st.sampled_from(("one", "two", "three")))
    with folder() as path, clean():
        _laid(path, files)
        store = MemoryStore()
        with clean():
            import_chunks(store, path, namespace=wanted)
        for info in list(store.entries()):
            own, kv = next((i, kv) for i, kv in _entries() if i.key == info.key)
            assert (info.namespace, info.token_ids) == (own.namespace, own.token_ids)
            assert wanted in (None, info.namespace)
            assert torch.equal(store.load(info.key), kv)
        untouched = [n for n in files if n != name and n.endswith(".safetensors")]
        if name.endswith(".safetensors") and wanted is None:
            assert len(list(store.entries())) >= len(untouched)


def damaged_remote(data: st.DataObject) -> None:
    """Whatever lies behind a URL: a chunk is what was published, or a miss."""
    files = dict(_published())
    name = data.draw(st.sampled_from(sorted(files)))
    match data.draw(st.sampled_from(("mutated", "json", "gone"))):
        case "json" if name.endswith(".json"):
            files[name] = _json_changed(data, files[name])
        case "gone":
            del files[name]
        case _:
            files[name] = mutated(data, files[name], before=data.draw(st.sampled_from((100, len(files[name])))))
    with folder() as path, clean():
        _laid(path / "remote", files)
        with (
            closing(FileStore(path / "local")) as local,
            closing(RemoteStore((path / "remote").as_uri(), local, timeout=5)) as store,
        ):
            for info, kv in _entries():
                with clean():
                    assert torch.equal(store.load(info.key), kv)
                with clean():
                    found = store.info(info.key)
                    assert found is None or (found.namespace, found.token_ids) == (info.namespace, info.token_ids)
            with clean():
                list(store.entries())
            with clean():
                store.verify()


PROPERTIES = {check.__name__: check for check in (damaged_export, damaged_remote)}
