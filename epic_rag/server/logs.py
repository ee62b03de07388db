"""Logs as lines of JSON, without the texts of prompts, answers and documents unless that is asked for."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
import time
import traceback
from typing import Any, TextIO

from epic_engine import EpicError

__all__ = ["JsonFormatter", "configure_logs"]

# What every record has; anything else was given with it.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# Of these the message tells of files, devices and settings. Others' may quote what they could not read.
_TELLING = (EpicError, OSError, RuntimeError, MemoryError, sqlite3.Error)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, and what was given as ``extra``.

    Parameters
    ----------
    texts
        Whether messages of exceptions are written that may quote a prompt; without it their kind and place are.
    """

    def __init__(self, *, texts: bool = False) -> None:
        super().__init__()
        self._texts = texts

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().rstrip(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = self._described(record.exc_info[1])
        # Surrogates that stand alone cannot be written.
        return json.dumps(line, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode()

    def _described(self, error: BaseException) -> str:
        if self._texts:
            return "".join(traceback.format_exception(error)).rstrip()
        lines: list[str] = []
        known: set[int] = set()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in known:
            known.add(id(cause))
            says = f": {cause}" if isinstance(cause, _TELLING) else ""
            lines += [f"{type(cause).__name__}{says}\n", *traceback.format_tb(cause.__traceback__)]
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        return "".join(lines).rstrip()


def configure_logs(level: str, *, texts: bool = False, stream: TextIO | None = None) -> None:
    """Have this process's records written as JSON: the gateway's and the engine's from a level on, others' warnings.

    Parameters
    ----------
    level
        ``debug``, ``info``, ``warning`` or ``error``.
    texts
        See :class:`JsonFormatter`.
    stream
        Standard error by default.
    """
    from transformers.utils import logging as transformers_logs

    # It has a handler of its own, which writes plain lines.
    transformers_logs.disable_default_handler()
    transformers_logs.enable_propagation()
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(texts=texts))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("epic_rag", "epic_engine", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    # The guard's own lines say more.
    logging.getLogger("uvicorn.access").disabled = True
