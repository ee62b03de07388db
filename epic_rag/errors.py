"""Every error that the text side raises on purpose.

All derive from :class:`RagError`, and through it from :class:`epic_engine.errors.EpicError`, so that one
``except EpicError`` catches whatever the package raises. Options that cannot be used raise the engine's
:class:`epic_engine.errors.ConfigError`::

    EpicError
    └── RagError
        ├── DocumentError (ValueError)              a document that cannot be read; names the path and the fix
        ├── GrammarError (ValueError)               a form of answer that cannot be enforced; names what cannot
        ├── RegistryError                           the registry of ingested documents cannot be used as asked
        │   └── DocumentNotFoundError (KeyError)    an id that the registry does not hold; names close matches
        └── MissingDependencyError (ImportError)    an optional package is absent; names the pip command
"""

from epic_engine.errors import EpicError

__all__ = [
    "DocumentError",
    "DocumentNotFoundError",
    "GrammarError",
    "MissingDependencyError",
    "RagError",
    "RegistryError",
]


class RagError(EpicError):
    """Base of the errors raised by the text side of the package."""


class DocumentError(RagError, ValueError):
    """A document that cannot be read or is of an unsupported kind."""


class GrammarError(RagError, ValueError):
    """A schema, pattern or tokenizer for which an answer's form cannot be enforced."""


class RegistryError(RagError):
    """The registry of ingested documents cannot be used as asked."""


class DocumentNotFoundError(RegistryError, KeyError):
    """No document or chunk of this id is registered."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which quotes and escapes the sentence.
        return str(self.args[0]) if self.args else ""


class MissingDependencyError(RagError, ImportError):
    """An optional package is not installed."""
