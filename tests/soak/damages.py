"""Bytes that change on the disk: torn tails, flipped bits, files that are cut or gone."""

from __future__ import annotations

import random
from pathlib import Path

from tests.damage import flip

from .disk import Spot, compare, picture
from .ledger import Ledger
from .trial import Trial

__all__ = ["flipped_dead", "flipped_header", "flipped_lock", "flipped_payload", "flipped_segment", "torn"]


def _segments(store: Path) -> list[Path]:
    return sorted((store / "segments").glob("*.seg"))


def _flip_in(rng: random.Random, file: Path, begin: int, end: int) -> str:
    at, bit = rng.randrange(begin, end), rng.randrange(8)
    flip(file, at, bit)
    return f"bit {bit} of byte {at} of {file.name}"


def _damaged(trial: Trial, path: Path, ledger: Ledger, before: dict[str, Spot], detail: list[str]) -> None:
    trial.outcome.detail = ", ".join(detail)
    trial.judge(path, ledger, damage=compare(before, path))


def flipped_payload(trial: Trial) -> None:
    """Bits of the KV of one to four chunks."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    chosen = trial.rng.sample(list(before.values()), trial.rng.randint(1, 4))
    detail = [_flip_in(trial.rng, path / s.file, s.offset, s.offset + s.stored) for s in chosen]
    _damaged(trial, path, ledger, before, detail)


def flipped_header(trial: Trial) -> None:
    """Bits of the header or the metadata of one to three records, or of the padding around them."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    spots = [spot for spot in before.values() if spot.head]
    detail = []
    for spot in trial.rng.sample(spots, trial.rng.randint(1, 3)):
        begin, end = trial.rng.choice([(0, 128), (0, 128), (128, len(spot.head)), (128, spot.offset - spot.start)])
        detail.append(_flip_in(trial.rng, path / spot.file, spot.start + begin, spot.start + end))
    _damaged(trial, path, ledger, before, detail)


def flipped_segment(trial: Trial) -> None:
    """Bits of the headers of segments. Nothing needs them; every second time the catalogue is lost, too."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    detail = [_flip_in(trial.rng, file, 0, 64) for file in trial.rng.sample(_segments(path), 2)]
    if trial.turn % 2 == 0:
        _damaged(trial, path, ledger, before, detail)
        return
    (path / "catalogue.sqlite").unlink()
    trial.outcome.detail = ", ".join([*detail, "no catalogue"])
    trial.judge(path, ledger, catalogue=True)
    if not trial.outcome.rebuilt:
        trial.outcome.other.append("a store without a catalogue was opened")


def flipped_dead(trial: Trial) -> None:
    """Bits of what no chunk needs: deleted and replaced records, padding, what a killed writer left at the end."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    detail = []
    for file in _segments(path):
        if trial.rng.random() < 0.5:
            with open(file, "ab") as handle:
                handle.write(trial.rng.randbytes(trial.rng.randrange(1, 3000)))
        name = f"segments/{file.name}"
        living = [range(s.start, s.offset + s.stored) for s in before.values() if s.file == name]
        places = [at for at in range(64, file.stat().st_size) if not any(at in span for span in living)]
        for at in trial.rng.sample(places, min(len(places), 3)):
            flip(file, at, trial.rng.randrange(8))
            detail.append(f"byte {at} of {name}")
    _damaged(trial, path, ledger, before, detail)


def flipped_lock(trial: Trial) -> None:
    """Lock files that hold something, or stand for nothing: only whether they are locked counts."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    (path / "owners").mkdir(exist_ok=True)
    names = [f"segments/{file.stem}.lock" for file in _segments(path)]
    names += ["segments/compaction.lock", f"segments/{trial.rng.randbytes(16).hex()}.lock",
              f"owners/{trial.rng.randbytes(16).hex()}.lock", "segments/x.lock"]  # fmt: skip
    chosen = trial.rng.sample(names, 4)
    for name in chosen:
        (path / name).write_bytes(trial.rng.randbytes(trial.rng.randrange(40)))
    _damaged(trial, path, ledger, before, chosen)


def torn(trial: Trial) -> None:
    """A segment loses its end, or gets another one; is emptied, or is gone. So does a file of format 1."""
    path, ledger = trial.start("mixed", "plain", "packed")
    before = picture(path)
    how = _WAYS[trial.turn % len(_WAYS)]
    # A file of format 1 has no records.
    old = [path / spot.file for spot in before.values() if not spot.head and how != "a header and no more"]
    file = trial.rng.choice(old if old and trial.rng.random() < 0.2 else _segments(path))
    spots = sorted((s for s in before.values() if path / s.file == file), key=lambda s: s.start)
    size = file.stat().st_size
    # From somewhere in one of the last records on.
    first = trial.rng.choice(spots[-2:]).start if spots else 0
    cut = trial.rng.randrange(first, size)
    if how == "removed":
        file.unlink()
    elif how == "emptied":
        file.write_bytes(b"")
    elif how == "garbage behind":
        with open(file, "ab") as handle:
            handle.write(trial.rng.randbytes(trial.rng.randrange(1, 5000)))
    elif how == "a header and no more":
        with open(file, "ab") as handle:
            spot = spots[0]
            handle.write(bytes(-size % 64) + spot.head[: trial.rng.randrange(1, len(spot.head) + 1)])
    elif how == "zeros at the end":
        with open(file, "rb+") as handle:
            handle.seek(cut)
            handle.write(bytes(size - cut))
    else:
        with open(file, "rb+") as handle:
            handle.truncate(cut if how == "cut" else trial.rng.randrange(0, 64))
    _damaged(trial, path, ledger, before, [f"{file.name} {how} ({cut} of {size} bytes)"])


_WAYS = ("cut", "zeros at the end", "garbage behind", "removed", "cut", "a header and no more", "emptied", "cut early")
