"""The embedded engine: compile token ids into relocatable KV, link them into prompts, generate.

Needs torch and transformers alone. Token ids go in; text, templates and documents belong to :mod:`epic_rag`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    ChunkNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EpicError,
    InsufficientResourcesError,
    ModelLoadError,
    OutOfPagesError,
    SelfTestError,
    StoreCorruptError,
    StoreError,
    StoreFormatError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from .best_of import best_of
    from .chunks import ChunkKey, CompiledChunk
    from .config import EngineConfig, SamplingParams
    from .constraint import TokenConstraint
    from .contexts import CompileContext
    from .costs import CompileEstimate
    from .engine import Engine
    from .linking.linked import LinkedPrompt
    from .linking.policies import LinkPolicy, parse_policies, parse_policy, policy_names
    from .metrics import Metrics
    from .request import Completion, RequestStats, StageTimes, StreamEvent
    from .request_options import RequestOptions
    from .sampler import TokenLogprob
    from .storage.exchange import ExportReport, ImportReport, export_chunks, import_chunks
    from .storage.file_store import FileStore
    from .storage.memory_store import MemoryStore
    from .storage.publish import PublishReport, publish
    from .storage.published import RemoteStatus
    from .storage.remote import RemoteStore
    from .storage.store import ChunkInfo, ChunkStore, GcReport, StoreUsage, VerifyReport
    from .stream import Stream

__all__ = [
    "ChunkInfo",
    "ChunkKey",
    "ChunkNotFoundError",
    "ChunkStore",
    "CompileContext",
    "CompileEstimate",
    "CompiledChunk",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EpicError",
    "ExportReport",
    "FileStore",
    "GcReport",
    "ImportReport",
    "InsufficientResourcesError",
    "LinkPolicy",
    "LinkedPrompt",
    "MemoryStore",
    "Metrics",
    "ModelLoadError",
    "OutOfPagesError",
    "PublishReport",
    "RemoteStatus",
    "RemoteStore",
    "RequestOptions",
    "RequestStats",
    "SamplingParams",
    "SelfTestError",
    "StageTimes",
    "StoreCorruptError",
    "StoreError",
    "StoreFormatError",
    "StoreUsage",
    "Stream",
    "StreamEvent",
    "TokenConstraint",
    "TokenLogprob",
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "best_of",
    "export_chunks",
    "import_chunks",
    "parse_policies",
    "parse_policy",
    "policy_names",
    "publish",
]

_HOMES = {
    "ChunkKey": ".chunks",
    "CompiledChunk": ".chunks",
    "EngineConfig": ".config",
    "SamplingParams": ".config",
    "TokenConstraint": ".constraint",
    "TokenLogprob": ".sampler",
    "CompileContext": ".contexts",
    "CompileEstimate": ".costs",
    "Engine": ".engine",
    "LinkedPrompt": ".linking.linked",
    "Stream": ".stream",
    "LinkPolicy": ".linking.policies",
    "parse_policies": ".linking.policies",
    "parse_policy": ".linking.policies",
    "policy_names": ".linking.policies",
    "ExportReport": ".storage.exchange",
    "ImportReport": ".storage.exchange",
    "export_chunks": ".storage.exchange",
    "import_chunks": ".storage.exchange",
    "FileStore": ".storage.file_store",
    "RemoteStore": ".storage.remote",
    "RemoteStatus": ".storage.published",
    "PublishReport": ".storage.publish",
    "publish": ".storage.publish",
    "MemoryStore": ".storage.memory_store",
    "ChunkInfo": ".storage.store",
    "ChunkStore": ".storage.store",
    "GcReport": ".storage.store",
    "StoreUsage": ".storage.store",
    "VerifyReport": ".storage.store",
    "Completion": ".request",
    "RequestStats": ".request",
    "StageTimes": ".request",
    "StreamEvent": ".request",
    "RequestOptions": ".request_options",
    "best_of": ".best_of",
    "Metrics": ".metrics",
}


def __getattr__(name: str) -> Any:
    # Torch and transformers take seconds to import; a module that needs an error class should not wait for them.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
