"""How a store is compiled and linked when nobody says: as it was tuned, or as built in."""

from __future__ import annotations

import json
from dataclasses import dataclass

from epic_rag.compiling import parse_context_name
from epic_rag.errors import RegistryError
from epic_rag.registry import Registry

__all__ = [
    "AUTO",
    "BUILT_IN",
    "LinkDefaults",
    "context_cost",
    "keep_kv_dtype",
    "kept_kv_dtype",
    "load_defaults",
    "save_defaults",
]

AUTO = "auto"
"""Stands for the store's default wherever a policy or a compile context is named."""


@dataclass(frozen=True)
class LinkDefaults:
    """A link policy and a compile context.

    Attributes
    ----------
    policy, context
        In string form.
    tuned
        Whether they were found on the store's own documents.
    """

    policy: str
    context: str
    tuned: bool = False


BUILT_IN = LinkDefaults("query_aware:0.1", "neighbours:2")
"""What docs/quality.md found to be best on the whole."""


def _name(fingerprint: str) -> str:
    return f"link_defaults:{fingerprint}"


def load_defaults(registry: Registry, fingerprint: str) -> LinkDefaults:
    """A store's defaults for one model; built-in ones where it was not tuned."""
    stored = registry.get_setting(_name(fingerprint))
    if stored is None:
        return BUILT_IN
    try:
        raw = json.loads(stored)
        found = LinkDefaults(raw["policy"], raw["context"], tuned=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        found = LinkDefaults("", "")
    if not (isinstance(found.policy, str) and isinstance(found.context, str) and found.policy):
        raise RegistryError("the defaults that this store was tuned to are damaged: tune it again, or ingest again.")
    return found


def save_defaults(registry: Registry, fingerprint: str, defaults: LinkDefaults) -> None:
    """Make a store's defaults for one model."""
    registry.set_setting(
        _name(fingerprint), json.dumps({"policy": defaults.policy, "context": defaults.context}, sort_keys=True)
    )


def kept_kv_dtype(registry: Registry) -> str | None:
    """What a store's chunks are kept as (:attr:`EngineConfig.kv_dtype`); None where it has none yet."""
    return (registry.get_setting("kv_dtype") or AUTO) if registry.counts()["chunks"] else None


def keep_kv_dtype(registry: Registry, kv_dtype: str) -> None:
    """Say what a store's chunks are kept as, which then holds for as long as it has any.

    Raises
    ------
    RegistryError
        If it has chunks that are kept as something else: every one of them would have to be compiled anew.
    """
    kept = kept_kv_dtype(registry)
    if kept not in (None, kv_dtype):
        raise RegistryError(
            f"the chunks of this store are kept as kv_dtype={kept!r}, not {kv_dtype!r}: leave kv_dtype at 'auto', "
            "which takes the store's own, or ingest into a new directory."
        )
    if registry.get_setting("kv_dtype") != kv_dtype:
        registry.set_setting("kv_dtype", kv_dtype)


def context_cost(context: str) -> int:
    """What compiling in a context costs, for comparisons: forward passes over the chunks, then what they read."""
    name, number = parse_context_name(context)
    return {"isolated": 0, "sink": 1, "head": 2, "neighbours": 100}[name] + number
