"""Every error that the engine raises on purpose.

All derive from :class:`EpicError`; where a built-in exception says the same thing the error derives from it
too, so that ``except ValueError`` keeps working::

    EpicError
    ├── ConfigError (ValueError)            an option or argument that cannot be used; names the fix
    ├── ModelLoadError                      the model was not found or could not be read
    │   └── UnsupportedModelError           the model was read but cannot be served exactly; names the reason
    ├── SelfTestError                       the engine's numbers differ from the untouched model's
    ├── ContextLengthError (ValueError)     prompt + max_tokens exceed the context; raised before any work
    ├── ChunkNotFoundError (KeyError)       a chunk key that this model and namespace do not have
    ├── StoreError                          the chunk store cannot be used
    │   ├── StoreFormatError                written by an incompatible version
    │   └── StoreCorruptError               stored bytes differ from what was written
    ├── InsufficientResourcesError          predicted disk or memory does not fit; raised before any work
    │   └── OutOfPagesError                 KV memory is short now; nothing was changed, so it can be tried again
    └── EngineClosedError (RuntimeError)    the engine was closed
"""

__all__ = [
    "ChunkNotFoundError",
    "ConfigError",
    "ContextLengthError",
    "EngineClosedError",
    "EpicError",
    "InsufficientResourcesError",
    "ModelLoadError",
    "OutOfPagesError",
    "SelfTestError",
    "StoreCorruptError",
    "StoreError",
    "StoreFormatError",
    "UnsupportedModelError",
]


class EpicError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(EpicError, ValueError):
    """An option or argument that cannot be used."""


class ModelLoadError(EpicError):
    """The model was not found or could not be read."""


class UnsupportedModelError(ModelLoadError):
    """The model was read but cannot be served exactly."""


class SelfTestError(EpicError):
    """The engine's numbers differ from the untouched model's by more than the tolerance."""


class ContextLengthError(EpicError, ValueError):
    """The prompt and the tokens asked for do not fit the context."""


class ChunkNotFoundError(EpicError, KeyError):
    """No compiled chunk with this key for this model and namespace."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which hides line breaks and quotes the sentence.
        return str(self.args[0]) if self.args else ""


class StoreError(EpicError):
    """The chunk store cannot be used."""


class StoreFormatError(StoreError):
    """The store was written by an incompatible version."""


class StoreCorruptError(StoreError):
    """Stored bytes differ from what was written."""


class InsufficientResourcesError(EpicError):
    """The work would need more disk or memory than there is."""


class OutOfPagesError(InsufficientResourcesError):
    """The KV memory has not as many pages left, even without the chunks that nobody uses."""


class EngineClosedError(EpicError, RuntimeError):
    """The engine was closed."""
