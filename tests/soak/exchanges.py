"""Chunks on their way to other stores: damaged exports, and published objects that are damaged or half written."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import struct
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from epic_engine import ChunkInfo, ChunkNotFoundError, FileStore, export_chunks, import_chunks
from epic_engine.storage import faults
from epic_engine.storage.publish import publish
from epic_engine.storage.remote import RemoteStore
from epic_engine.storage.store import ChunkStore

from tests.damage import flip

from .chunks import entry, key_of, numbers_by_key
from .judge import SEGMENT_BYTES
from .ledger import Ledger
from .trial import Trial, forked, killed_at

__all__ = ["damaged_export", "damaged_remote", "killed_export", "killed_publication"]


def _harm(rng: random.Random, file: Path) -> str:
    """Flip a bit of a file, cut it, put something behind it, empty or remove it."""
    size = file.stat().st_size
    how = rng.choice(["flipped", "flipped", "flipped", "cut", "cut", "longer", "emptied", "removed"])
    at = rng.randrange(size)
    if how == "flipped":
        flip(file, at, rng.randrange(8))
    elif how == "removed":
        file.unlink()
    elif how == "longer":
        with open(file, "ab") as handle:
            handle.write(rng.randbytes(rng.randrange(1, 300)))
    else:
        os.truncate(file, at if how == "cut" else 0)
    return f"{file.name} {how} at {at} of {size}"


def _versions(ledger: Ledger, number: int) -> list[tuple[ChunkInfo, torch.Tensor]]:
    old = ledger.of_format_1()
    states = ledger.allowed().get(number, set())
    return [entry(number, v, old=number in old and v == 0) for v in states if v is not None]


def _given(trial: Trial, store: ChunkStore, ledger: Ledger) -> set[int]:
    """Which chunks another store gives; what is none that was put is a wrong hit."""
    found = set()
    names = numbers_by_key(list(ledger.ever()))
    for number in ledger.ever():
        try:
            info, kv = store.info(key_of(number)), store.load(key_of(number))
        except ChunkNotFoundError:
            continue
        for want, tensor in _versions(ledger, number):
            plain = replace(want, encoding=want.encoding.partition("+")[0])
            if info in (want, plain) and kv.dtype == tensor.dtype and torch.equal(kv, tensor):
                found.add(number)
                break
        else:
            trial.outcome.wrong_hits.append(f"chunk {number}: {info}"[:160])
    for info in store.entries():
        if info.key.hex not in names:
            trial.outcome.wrong_hits.append(f"a list has {info}"[:160])
    return found


# -- exports ---------------------------------------------------------------------------------------------------


def _tensors(file: Path) -> tuple[int, dict[str, list[tuple[int, int]]]]:
    """Bytes of a file's header, and where the tensors of each key lie, as safetensors defines it."""
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    found: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            found.setdefault(name.split(".")[0], []).append((8 + length + begin, 8 + length + end))
    return 8 + length, found


def damaged_export(trial: Trial) -> None:
    """A file of an export is damaged; what is whole in it gets into another store, and nothing else."""
    path, ledger = trial.start("mixed", "plain", "packed")
    target = trial.folder / "export"
    with closing(FileStore(path, segment_bytes=SEGMENT_BYTES)) as store:
        export_chunks(store, target, file_bytes=trial.rng.choice([6000, 15_000, 1 << 30]))
    files = sorted(target.iterdir())
    before = {file: (file.read_bytes(), *_tensors(file)) for file in files if file.suffix == ".safetensors"}
    hurt = trial.rng.choice(files)
    trial.outcome.detail = _harm(trial.rng, hurt)
    names = numbers_by_key(list(ledger.ever()))
    whole: set[int] = set()
    for file, (raw, header, tensors) in before.items():
        now = file.read_bytes() if file.exists() else b""
        if now[:header] == raw[:header]:
            whole |= {names[k] for k, spans in tensors.items() if all(now[a:b] == raw[a:b] for a, b in spans)}
    trial.outcome.damaged = len(names.keys() & {k for _, _, t in before.values() for k in t}) - len(whole)
    with closing(FileStore(trial.folder / "other", segment_bytes=SEGMENT_BYTES)) as other:
        report = import_chunks(other, target)
        found = _given(trial, other, ledger)
        trial.outcome.reported = bool(report.problems)
        trial.outcome.misses = len(set(ledger.here()) - found)
        trial.outcome.lost_intact += [f"chunk {number}" for number in sorted(whole - found)]
        if set(ledger.here()) - found and not report.problems:
            trial.outcome.unreported.append(f"{len(set(ledger.here()) - found)} chunks of the export")
        if report.chunks != len(found):
            trial.outcome.other.append(f"{report.chunks} chunks are said to be imported, {len(found)} are there")
        if not other.verify().clean:
            trial.outcome.other.append("the other store is not clean")
    trial.judge(path, ledger)


def killed_export(trial: Trial) -> None:
    """An export is killed: its files are whole or absent, and it can be done again in the same place."""
    path, ledger = trial.start("mixed", "plain", "packed")
    target = trial.folder / "export"
    point = trial.rng.choice([point for point in faults.POINTS if point.startswith("export.")])
    number = trial.rng.randrange(6)
    trial.outcome.detail = f"killed at {point} the {number + 1}. time"

    def work() -> None:
        with faults.install(killed_at(point, number)), closing(FileStore(path)) as store:
            export_chunks(store, target, file_bytes=8000)

    os.waitpid(forked(work), 0)
    for file in target.glob("*.safetensors") if target.exists() else []:
        _tensors(file)
    finished = (target / "index.json").exists()
    with closing(FileStore(path)) as store, closing(FileStore(trial.folder / "other")) as other:
        if not finished:
            export_chunks(store, target, file_bytes=8000)
        report = import_chunks(other, target)
        if _given(trial, other, ledger) != set(ledger.here()) or report.problems:
            trial.outcome.other.append(f"the export is not whole: {report.problems}")
    trial.judge(path, ledger)


# -- published stores ------------------------------------------------------------------------------------------


def _records(folder: Path) -> dict[str, tuple[Path, int, int, bytes]]:
    """Records of published segments by key: file, begin, end, bytes; read as the format's description says."""
    found = {}
    for file in (folder / "segments").glob("*.seg"):
        raw = file.read_bytes()
        at = 64
        while at + 128 <= len(raw):
            head = raw[at : at + 128]
            if head[:8] != b"EPICREC2" or xxhash.xxh3_64_digest(head[:120]) != head[120:]:
                at += 64
                continue
            length, stored = struct.unpack_from("<I", head, 8)[0], struct.unpack_from("<Q", head, 16)[0]
            end = -(-(at + 128 + length) // 64) * 64 + stored
            found[head[24:56].hex()] = (file, at, end, raw[at:end])
            at = -(-end // 64) * 64
    return found


def _remote(trial: Trial, url: Path, name: str) -> RemoteStore:
    local = FileStore(trial.folder / name, segment_bytes=SEGMENT_BYTES)
    return RemoteStore(str(url), local, refresh_seconds=3600, timeout=30)


def damaged_remote(trial: Trial) -> None:
    """A published object is damaged: chunks in it are misses, others are not, and the local store goes on."""
    logging.disable(logging.WARNING)
    path, ledger = trial.start("mixed", "plain", "packed")
    url = trial.folder / "published"
    with closing(FileStore(path, segment_bytes=SEGMENT_BYTES)) as store:
        publish(store, str(url))
    records = _records(url)
    names = numbers_by_key(list(ledger.ever()))
    objects = sorted(file for file in url.rglob("*") if file.is_file())
    kind = trial.rng.choice(["segments", "segments", "catalogues", "current.json"])
    hurt = trial.rng.choice([file for file in objects if kind in file.relative_to(url).as_posix()])
    trial.outcome.detail = _harm(trial.rng, hurt)
    whole = {names[key] for key, (file, begin, end, raw) in records.items()
             if file.exists() and file.read_bytes()[begin:end] == raw}  # fmt: skip
    trial.outcome.damaged = len(records) - len(whole)
    remote = _remote(trial, url, "other")
    found = _given(trial, remote, ledger)
    missing = set(ledger.here()) - found
    trial.outcome.misses = len(missing)
    status = remote.status
    trial.outcome.reported = bool(status.unusable) or status.generation is None
    if kind == "segments":
        trial.outcome.lost_intact += [f"chunk {number}" for number in sorted(whole & missing)]
    elif missing and found:
        trial.outcome.other.append("a damaged list of chunks was believed in part")
    if missing and not trial.outcome.reported:
        trial.outcome.unreported.append(f"{len(missing)} chunks, {status}")
    remote.put([entry(number) for number in sorted(missing)])  # what is missing is compiled here
    again = [number for number in sorted(missing) if not torch.equal(remote.load(key_of(number)), entry(number)[1])]
    if again or not remote.verify().clean:
        trial.outcome.other.append(f"compiled here, and not to be had: {again}")
    remote.close()
    trial.judge(path, ledger)


def killed_publication(trial: Trial) -> None:
    """A publication is killed at some moment: the last one stays whole, and the next one goes on."""
    path, ledger = trial.start("mixed", "plain", "packed")
    url = trial.folder / "published"
    published = ledger.copied(trial.folder / "published.ledger")
    with closing(FileStore(path, segment_bytes=SEGMENT_BYTES)) as store:
        publish(store, str(url))
        ledger.begin(dict.fromkeys(range(100, 140), 0))
        store.put([entry(number) for number in range(100, 140)])
        ledger.done()
        gone = ledger.here()[:3]
        ledger.begin(dict.fromkeys(gone))
        store.delete([key_of(number) for number in gone])
        ledger.done()
    seconds = trial.rng.uniform(0.0, 0.12)
    trial.outcome.detail = f"killed after {seconds:.4f} s"

    def work() -> None:
        with closing(FileStore(path, segment_bytes=SEGMENT_BYTES)) as store:
            publish(store, str(url))

    child = forked(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with closing(_remote(trial, url, "other")) as remote:
        found = {number for number in {*ledger.here(), *gone} if remote.info(key_of(number)) is not None}
        if found not in (set(published.here()), set(ledger.here())):
            trial.outcome.other.append(f"neither what was published nor what is new: {sorted(found)}")
        _given(trial, remote, published if found == set(published.here()) else ledger)
    work()
    with closing(_remote(trial, url, "third")) as remote:
        trial.outcome.lost_intact += [f"chunk {n}" for n in set(ledger.here()) - _given(trial, remote, ledger)]
    trial.judge(path, ledger)
