"""RAG answers in a fraction of the time: documents are compiled when they are indexed and only linked for a question.

>>> from epic_rag import EpicRAG
>>> rag = EpicRAG.open("handbook.epic")            # doctest: +SKIP
>>> rag.add("docs/")                               # doctest: +SKIP
>>> print(rag.ask("How long is the guarantee?"))   # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epic_engine import SamplingParams, __version__

    from epic_rag.answers import Answer, AnswerStream, Source
    from epic_rag.chunking import ChunkingConfig
    from epic_rag.documents import Document
    from epic_rag.ingest import IngestReport
    from epic_rag.pipeline import EpicRAG
    from epic_rag.texts import CompiledTexts, TextItem

__all__ = [
    "Answer",
    "AnswerStream",
    "ChunkingConfig",
    "CompiledTexts",
    "Document",
    "EpicRAG",
    "IngestReport",
    "SamplingParams",
    "Source",
    "TextItem",
    "__version__",
]

_HOMES = {
    "Answer": "epic_rag.answers",
    "AnswerStream": "epic_rag.answers",
    "ChunkingConfig": "epic_rag.chunking",
    "CompiledTexts": "epic_rag.texts",
    "Document": "epic_rag.documents",
    "EpicRAG": "epic_rag.pipeline",
    "IngestReport": "epic_rag.ingest",
    "SamplingParams": "epic_engine",
    "Source": "epic_rag.answers",
    "TextItem": "epic_rag.texts",
    "__version__": "epic_engine",
}


def __getattr__(name: str) -> Any:
    # Torch and transformers take seconds to import; `epic-rag --help` should not.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
