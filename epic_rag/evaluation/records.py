"""What was measured for each example, and the file in which it waits for a run to be resumed.

The file is JSON lines: the run's settings first, then one example a line, appended as it is finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from epic_rag.errors import RagError

__all__ = ["ArmResult", "ExampleResult", "RecordFile", "compiled_label"]

# Lines between two calls of fsync: after a power cut at most these examples are measured again.
_SYNC_EVERY = 4


def compiled_label(context: str, kv_dtype: str) -> str:
    """How an arm's chunks were compiled and kept; empty where it uses none."""
    return context if kv_dtype == "auto" else f"{context} · {kv_dtype}"


@dataclass(frozen=True)
class ArmResult:
    """One example under one policy, compile context and type of stored KV.

    Attributes
    ----------
    policy, context
        In string form; the context is empty where no compiled chunk is used (``full``, ``prefix``).
    answer
        Greedy answer.
    score
        Its score, 0 to 1; None without accepted answers.
    kl
        KL(full ‖ this), mean over the tokens of full's own answer and its end, in nats.
    agreement
        Share of these tokens whose most likely token is full's.
    first_token
        Whether the most likely first token is full's.
    nll
        Negative log-likelihood of the gold answer a token, in nats; None without accepted answers.
    prompt, rows, recomputed
        Tokens of the prompt, rows computed to link it, and linked tokens computed anew.
    ttft_s
        Seconds to the first token.
    kv_dtype
        What compiled chunks were kept as; ``"auto"`` where none is used.
    kv_kl, kv_agreement
        As ``kl`` and ``agreement``, but against the same policy and context with ``"auto"``: what rounding stored KV
        alone changes. None where that was not measured, and for ``"auto"`` itself.
    """

    policy: str
    context: str
    answer: str
    score: float | None
    kl: float
    agreement: float
    first_token: bool
    nll: float | None
    prompt: int
    rows: int
    recomputed: int
    ttft_s: float
    kv_dtype: str = "auto"
    kv_kl: float | None = None
    kv_agreement: float | None = None

    @property
    def label(self) -> str:
        """For legends and tables."""
        compiled = compiled_label(self.context, self.kv_dtype)
        return f"{self.policy} · {compiled}" if compiled else self.policy


@dataclass(frozen=True)
class ExampleResult:
    """One example under all policies and contexts.

    Attributes
    ----------
    example_id, digest, group
        As in :class:`~epic_rag.evaluation.example.EvalExample`.
    arms
        ``full`` first; empty if the example was skipped.
    skipped
        Why nothing was measured, such as a prompt that is too long.
    """

    example_id: str
    digest: str
    group: Mapping[str, str]
    arms: tuple[ArmResult, ...] = ()
    skipped: str = ""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**raw, "arms": tuple(ArmResult(**arm) for arm in raw["arms"])})


@dataclass
class RecordFile:
    """Appends results to a file, and hands out those that an earlier run left there.

    Parameters
    ----------
    path
        The file; made with its folders where absent.
    settings
        Everything that the figures depend on, as JSON. A file of other settings is refused.

    Attributes
    ----------
    found
        Earlier results by the digest of their example.

    Raises
    ------
    RagError
        If the file was written with other settings, or is no such file; names what differs and what to do.
    """

    path: Path
    settings: Mapping[str, Any]
    found: dict[str, ExampleResult] = field(default_factory=dict, init=False)
    _unsynced: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Read what is there and open the file for appending."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        good = self._read() if self.path.exists() else 0
        self._file = self.path.open("ab")
        # A line that was torn by a crash is measured again.
        self._file.truncate(good)
        if not good:
            self._append({"settings": self.settings})

    def _read(self) -> int:
        """Take over the earlier results; returns the number of bytes that are whole."""
        good = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                raw = json.loads(line)
                if number == 1:
                    self._compare(raw["settings"])
                else:
                    result = ExampleResult.from_dict(raw)
                    self.found[result.digest] = result
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RagError(
                    f"{self.path}, line {number}, is no record of an evaluation: delete the file, or write the "
                    "results elsewhere with --json."
                ) from error
            good += len(line)
        return good

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.settings))
        differing = [
            f"{name} was {earlier.get(name)!r} and is {now.get(name)!r}"
            for name in sorted({*earlier, *now})
            if earlier.get(name) != now.get(name)
        ]
        if differing:
            raise RagError(
                f"{self.path} holds results of other settings ({'; '.join(differing)}): delete it to start anew, or "
                "write these results elsewhere with --json."
            )

    def append(self, result: ExampleResult) -> None:
        """Add one example's result."""
        self._append(asdict(result))

    def _append(self, raw: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(raw, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._unsynced += 1
        if self._unsynced >= _SYNC_EVERY:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        """Make everything durable and close the file."""
        if not self._file.closed:
            self._sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
