"""A campaign of injected faults against the chunk store: ``python -m tests.soak.faults --count 1000``.

A trial is a number. It says which fault, and is the seed of everything else, so that ``--only NUMBER`` does it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from epic_engine.storage import indices
from rich.progress import Progress

from .kinds import kind_of
from .outcome import Outcome
from .report import summary, write_markdown
from .trial import Passes, Trial
from .work import SCRIPTS, Base, bases, passes

__all__ = ["Campaign", "main"]

MOST_SECONDS = 120


class Campaign:
    """Runs trials, each in a process of its own, so that none can harm another.

    Parameters
    ----------
    folder
        Scratch space.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self._bases: list[Base] = bases(folder)
        self._passes: Passes = {}
        for number, base in enumerate(self._bases):
            for script in range(SCRIPTS):
                scratch = folder / "passes"
                scratch.mkdir()
                with _merging():
                    self._passes[number, script] = passes(base, scratch, script)

    def trial(self, seed: int, *, keep: bool = False) -> dict[str, Any]:
        """One trial.

        Returns
        -------
        dict
            An :class:`Outcome`'s fields with ``seed``, ``kind`` and ``seconds``.
        """
        kind, turn = kind_of(seed)
        folder = self._folder / f"trial-{seed}"
        folder.mkdir()
        trial = Trial(turn, random.Random(seed), folder, self._bases, self._passes)
        begun = time.monotonic()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                os.setpgid(0, 0)
                try:
                    with _merging():
                        kind.inflict(trial)
                except Exception:
                    trial.outcome.other.append(f"{trial.outcome.detail}\n{traceback.format_exc()}")
                with os.fdopen(write, "w") as file:
                    json.dump(trial.outcome.as_dict(), file)
            finally:
                os._exit(0)
        os.close(write)
        try:
            found = _answer(read, child)
        finally:
            os.close(read)
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
        return {"seed": seed, "kind": kind.name, "seconds": time.monotonic() - begun, **found}


def _merging() -> AbstractContextManager[object]:
    """Small stores merge their indices as large ones do."""
    return mock.patch.object(indices, "MERGE_EVERY", 3)


def _answer(pipe: int, child: int) -> dict[str, Any]:
    """What a trial found; what kept it from answering is found, too."""
    text = b""
    end = time.monotonic() + MOST_SECONDS
    why = ""
    try:
        while True:
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                why = f"it took more than {MOST_SECONDS} s"
                break
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            text += piece
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        found = Outcome(other=[why or f"its process ended with {status}"]).as_dict()
    return found


def main() -> int:
    """See the module's docstring; returns 1 if anything happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--kind", default="", help="only kinds with this in their names")
    parser.add_argument("--only", type=int, help="one trial, whose folder is kept")
    parser.add_argument("--folder", type=Path, help="scratch space; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    parser.add_argument("--markdown", type=Path, help="write the table into this page")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="epic-rag-faults-", dir=options.folder))
    folder.chmod(0o711)  # read-only stores are read as another user
    seeds = list(range(options.seed, options.seed + options.count)) if options.only is None else [options.only]
    seeds = [seed for seed in seeds if options.kind in kind_of(seed)[0].name]
    outcomes: list[dict[str, Any]] = []
    begun = time.monotonic()
    try:
        campaign = Campaign(folder)
        with Progress(transient=True) as progress:
            bar = progress.add_task("faults", total=len(seeds))
            for seed in seeds:
                outcome = campaign.trial(seed, keep=options.only is not None)
                outcomes.append(outcome)
                progress.advance(bar)
                if lines := Outcome.from_dict(outcome).violations:
                    progress.console.print(
                        f"--only {seed}: {outcome['kind']}: {outcome['detail']}", *lines, sep="\n    ", markup=False,
                        highlight=False, soft_wrap=True,
                    )  # fmt: skip
    except KeyboardInterrupt:
        print(f"interrupted after {len(outcomes)} of {len(seeds)} trials", file=sys.stderr)
    finally:
        if options.only is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"kept: {folder}")
    if options.only is not None:
        print(json.dumps(outcomes, indent=2, ensure_ascii=False))
    print(summary(outcomes, time.monotonic() - begun))
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    whole = len(outcomes) == len(seeds)
    if options.markdown and whole:
        write_markdown(options.markdown, outcomes)
    return int(not whole or any(Outcome.from_dict(outcome).violations for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
