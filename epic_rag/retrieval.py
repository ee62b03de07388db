"""Retrieval: which chunks does a question need?

Two small protocols, :class:`Embedder` and :class:`Retriever`, and the implementations used by default: a
sentence transformer and an exact FAISS index. The index is derived from the registry's embeddings and can be
rebuilt from them at any time.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from epic_engine.errors import ConfigError

from epic_rag._embedders import MiniLMEmbedder, Progress, SentenceTransformerEmbedder, Vectors
from epic_rag.errors import MissingDependencyError

__all__ = [
    "Embedder",
    "FaissRetriever",
    "Hit",
    "MiniLMEmbedder",
    "Progress",
    "Retriever",
    "SentenceTransformerEmbedder",
    "Vectors",
]


class Embedder(Protocol):
    """Turns texts into unit vectors whose inner product says how near their meanings are."""

    @property
    def name(self) -> str:
        """Names the vector space: vectors of different names must not meet in one index."""
        ...

    @property
    def dim(self) -> int:
        """The number of dimensions."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return float32 of shape ``(len(texts), dim)`` with rows of length 1."""
        ...


@dataclass(frozen=True)
class Hit:
    """A chunk that was found.

    Parameters
    ----------
    chunk_id
        Its id.
    score
        How near it is; greater is nearer. For unit vectors the cosine, -1 to 1.
    """

    chunk_id: str
    score: float


class Retriever(Protocol):
    """Finds chunks for a question."""

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Add chunks by their ids and vectors of shape ``(len(ids), dim)``; known ids are replaced."""
        ...

    def remove(self, ids: Iterable[str]) -> None:
        """Remove chunks; unknown ids are ignored."""
        ...

    def rebuild(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Hold exactly these chunks from now on."""
        ...

    def search(self, question: str, k: int) -> list[Hit]:
        """Return the `k` nearest chunks, or all if there are fewer, nearest first."""
        ...

    def __len__(self) -> int:
        """Return how many chunks are held."""
        ...


class FaissRetriever:
    """Exact search by inner product over all chunks, in memory.

    Safe to use from several threads. Searching 100,000 vectors of 384 dimensions takes tens of milliseconds
    on two CPU cores.

    Parameters
    ----------
    embedder
        Embeds the questions; must be the one that embedded the chunks.

    Raises
    ------
    MissingDependencyError
        If FAISS is not installed.
    """

    def __init__(self, embedder: Embedder) -> None:
        try:
            import faiss
        except ImportError as error:
            raise MissingDependencyError(f"search needs FAISS ({error}): pip install faiss-cpu") from error
        self._faiss = faiss
        self._embedder = embedder
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._index: Any = None
        self._number_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Add chunks; known ids are replaced.

        Parameters
        ----------
        ids
            n different chunk ids.
        vectors
            Float32 of shape ``(n, dim)``, rows of length 1.

        Raises
        ------
        ConfigError
            If ids repeat or the vectors are not of this shape and type; nothing is changed then.
        """
        matrix = self._checked(ids, vectors)
        with self._lock:
            self._remove(ids)
            self._add(ids, matrix)

    def remove(self, ids: Iterable[str]) -> None:
        """Remove chunks. Unknown ids are ignored: another process may have been faster."""
        with self._lock:
            self._remove(ids)

    def rebuild(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Hold exactly these chunks from now on, e.g. those of ``Registry.embeddings()``.

        Raises
        ------
        ConfigError
            As :meth:`add`.
        """
        # An empty registry knows no dimension.
        matrix = self._checked(ids, vectors) if len(ids) or len(vectors) else None
        with self._lock:
            self._clear()
            if matrix is not None:
                self._add(ids, matrix)

    def search(self, question: str, k: int) -> list[Hit]:
        """Find the chunks nearest to a question.

        Parameters
        ----------
        question
            Any text.
        k
            Most hits wanted.

        Returns
        -------
        list of Hit
            ``min(k, len(self))`` hits, nearest first; of equal scores the one added first.

        Raises
        ------
        ConfigError
            If `k` is less than 1.
        """
        _check_k(k)
        if not len(self):
            return []
        return self.search_vector(self._embedder.embed([question])[0], k)

    def search_vector(self, vector: Vectors, k: int) -> list[Hit]:
        """Find the chunks nearest to a vector.

        Parameters
        ----------
        vector
            Float32 of shape ``(dim,)``, of length 1.
        k
            Most hits wanted.

        Returns
        -------
        list of Hit
            As :meth:`search`.

        Raises
        ------
        ConfigError
            If `k` is less than 1 or the vector has another shape.
        """
        _check_k(k)
        if np.shape(vector) != (self._embedder.dim,):
            raise ConfigError(
                f"the vector has shape {np.shape(vector)}: the embedder {self._embedder.name!r} makes "
                f"({self._embedder.dim},)"
            )
        query = np.ascontiguousarray(vector, np.float32)[None]
        with self._lock:
            if not self._number_of:
                return []
            scores, numbers = self._index.search(query, min(k, len(self._number_of)))
            found = sorted(zip((-scores[0]).tolist(), numbers[0].tolist(), strict=True))
            # FAISS fills up with -1 where it found nothing.
            return [Hit(self._id_of[number], -score) for score, number in found if number >= 0]

    def _checked(self, ids: Sequence[str], vectors: Vectors) -> Vectors:
        expected = (len(ids), self._embedder.dim)
        if np.shape(vectors) != expected:
            raise ConfigError(
                f"the vectors have shape {np.shape(vectors)}: pass {expected}, one row an id, made by the "
                f"embedder {self._embedder.name!r}"
            )
        if not np.isfinite(vectors).all():
            raise ConfigError("the vectors hold NaN or infinite values: check the embedder's output")
        if len(set(ids)) != len(ids):
            raise ConfigError("the ids repeat: pass every chunk once")
        return np.ascontiguousarray(vectors, np.float32)

    def _add(self, ids: Sequence[str], matrix: Vectors) -> None:
        if not len(ids):
            return
        if self._index is None:
            self._index = self._faiss.IndexIDMap2(self._faiss.IndexFlatIP(matrix.shape[1]))
        numbers = np.arange(self._next, self._next + len(ids), dtype=np.int64)
        self._index.add_with_ids(matrix, numbers)
        self._next += len(ids)
        self._number_of.update(zip(ids, numbers.tolist(), strict=True))
        self._id_of.update(zip(numbers.tolist(), ids, strict=True))

    def _remove(self, ids: Iterable[str]) -> None:
        numbers = [self._number_of.pop(i) for i in ids if i in self._number_of]
        if not numbers:
            return
        self._index.remove_ids(np.array(numbers, np.int64))
        for number in numbers:
            del self._id_of[number]


def _check_k(k: int) -> None:
    if k < 1:
        raise ConfigError(f"k is {k}: ask for at least 1 chunk")
