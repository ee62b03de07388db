"""The embedded engine: compile token ids into relocatable KV, link them into prompts, generate.

Needs torch and transformers alone. Token ids go in; text, templates and documents belong to :mod:`epic_rag`.
"""

from ._version import __version__
from .chunks import ChunkKey, CompiledChunk
from .config import EngineConfig, SamplingParams
from .contexts import CompileContext
from .engine import CompileEstimate, Engine, Stream
from .errors import (
    ChunkNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EpicError,
    InsufficientResourcesError,
    ModelLoadError,
    SelfTestError,
    StoreCorruptError,
    StoreError,
    StoreFormatError,
    UnsupportedModelError,
)
from .linking.policies import LinkPolicy, parse_policy, policy_names
from .memory.file_store import FileStore
from .memory.store import ChunkInfo, ChunkStore, MemoryStore, VerifyReport
from .request import Completion, RequestStats, StageTimes, StreamEvent

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
    "FileStore",
    "InsufficientResourcesError",
    "LinkPolicy",
    "MemoryStore",
    "ModelLoadError",
    "RequestStats",
    "SamplingParams",
    "SelfTestError",
    "StageTimes",
    "StoreCorruptError",
    "StoreError",
    "StoreFormatError",
    "Stream",
    "StreamEvent",
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "parse_policy",
    "policy_names",
]
