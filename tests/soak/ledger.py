"""What a store has promised, kept apart from it: which versions of which chunks may be there now.

Written to a file before and after each change, so that it outlives a process that is killed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

__all__ = ["Ledger"]


class Ledger:
    """Changes begun and done, one a line. A version is a number, or None for a chunk that is gone.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def begin(self, changes: Mapping[int, int | None]) -> None:
        """A change is about to be made: until :meth:`done`, either state may be found, of all chunks the same."""
        self._say("begin", changes)

    def done(self) -> None:
        """The change that was begun last is durable."""
        self._say("done", {})

    def may_be_gone(self, *numbers: int) -> None:
        """These chunks were damaged on purpose."""
        self._say("maybe", dict.fromkeys(numbers))

    def old(self, *numbers: int) -> None:
        """These chunks were written in format 1."""
        self._say("old", dict.fromkeys(numbers, 0))

    def last_may_be_undone(self) -> None:
        """The change that was done last may be lost, as if its process had been killed."""
        lines = self.path.read_text(encoding="ascii").splitlines(keepends=True)
        done = max(number for number, line in enumerate(lines) if json.loads(line)[0] == "done")
        del lines[done]
        self.path.write_text("".join(lines), encoding="ascii")

    def copied(self, path: Path) -> Self:
        """The same, in another file."""
        shutil.copyfile(self.path, path)
        return type(self)(path)

    def _say(self, word: str, changes: Mapping[int, int | None]) -> None:
        with open(self.path, "a", encoding="ascii") as file:
            file.write(json.dumps([word, list(changes.items())]) + "\n")

    def _lines(self) -> list[tuple[str, dict[int, int | None]]]:
        found: list[Any] = [json.loads(line) for line in self.path.read_text(encoding="ascii").splitlines()]
        return [(word, dict(changes)) for word, changes in found]

    def allowed(self) -> dict[int, set[int | None]]:
        """The versions that each chunk may have."""
        states: dict[int, set[int | None]] = {}
        last: dict[int, int | None] = {}
        for word, changes in self._lines():
            if word == "done":
                states.update({number: {version} for number, version in last.items()})
            else:
                if word == "begin":
                    last = changes
                for number, version in changes.items():
                    states[number] = {version} if word == "old" else states.get(number, {None}) | {version}
        return states

    def ever(self) -> dict[int, set[int]]:
        """The versions that each chunk has had or was about to get."""
        found: dict[int, set[int]] = {}
        for _, changes in self._lines():
            for number, version in changes.items():
                if version is not None:
                    found.setdefault(number, set()).add(version)
        return found

    def of_format_1(self) -> set[int]:
        """Chunks that were written in format 1, and perhaps moved since."""
        return {number for word, changes in self._lines() if word == "old" for number in changes}

    def damaged(self) -> set[int]:
        """Chunks that were damaged on purpose, some time."""
        return {number for word, changes in self._lines() if word == "maybe" for number in changes}

    def unfinished(self) -> dict[int, int | None]:
        """The last change, if it was begun and not done."""
        lines = [(word, changes) for word, changes in self._lines() if word in ("begin", "done")]
        return lines[-1][1] if lines and lines[-1][0] == "begin" else {}

    def here(self) -> list[int]:
        """Chunks that are certainly there."""
        return sorted(number for number, states in self.allowed().items() if None not in states)
