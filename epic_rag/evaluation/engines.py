"""One model in several engines, which differ in what they keep compiled chunks as."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from epic_engine import Engine

__all__ = ["engines_of"]


@contextlib.contextmanager
def engines_of(engine: Engine, kv_dtypes: Sequence[str]) -> Iterator[dict[str, Engine]]:
    """Engines that share an engine's weights, each with a store of its own in memory; closed at the end.

    Parameters
    ----------
    engine
        Stands for its own ``kv_dtype``, and stays open.
    kv_dtypes
        Values of :attr:`EngineConfig.kv_dtype <epic_engine.EngineConfig>`.

    Yields
    ------
    dict
        Engine by ``kv_dtype``.

    Raises
    ------
    ConfigError
        If a value is unknown or does not fit the model.
    """
    found = {engine.config.kv_dtype: engine}
    # Which context is compiled is said chunk by chunk, and the model was tested with its first engine.
    common = replace(engine.config, context="isolated", selftest=False)
    with contextlib.ExitStack() as made:
        for name in kv_dtypes:
            if name not in found:
                options = asdict(replace(common, kv_dtype=name))
                found[name] = made.enter_context(
                    Engine(engine.decoder.reference, tokenizer=engine.tokenizer, **options)
                )
        yield found
