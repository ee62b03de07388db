"""Triton's interpreter, without most of its overhead."""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """Have the interpreter prepare the modules of a kernel once a launch.

    Otherwise it goes through all of ``triton.language`` each time that a kernel calls one of its functions, such as
    ``tl.sum``, which takes most of the time of a small program.
    """
    from triton.runtime import interpreter

    prepare, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if getattr(prepare, "quick", False):
        return
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)  # triples integer sums
    ready: set[int] = set()

    def prepare_once(fn: Any) -> Any:
        modules = id(fn.__globals__)
        if modules in ready:
            return None
        ready.add(modules)
        return prepare(fn)

    def execute_afresh(self: Any, *arguments: Any, **options: Any) -> Any:
        ready.clear()
        return execute(self, *arguments, **options)

    prepare_once.quick = True  # type: ignore[attr-defined]
    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = execute_afresh
