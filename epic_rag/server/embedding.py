"""Texts to vectors, as OpenAI's clients ask for them."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder
from epic_rag.server.errors import ApiError
from epic_rag.server.schemas.models import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage

__all__ = ["embed"]

_MOST_INPUTS = 2048


def embed(asked: EmbeddingRequest, embedder: Embedder, composer: PromptComposer, vocabulary: int) -> EmbeddingList:
    """Embed texts; blocks.

    Parameters
    ----------
    asked
        The request; its model was looked at.
    embedder
        Embeds.
    composer
        Its tokenizer is the one of token ids.
    vocabulary
        Its size.

    Raises
    ------
    ApiError
        400 if there is nothing to embed, or something that cannot be.
    """
    if asked.dimensions not in (None, embedder.dim):
        raise ApiError(
            400,
            f"this gateway's embeddings have {embedder.dim} dimensions: leave dimensions out.",
            code="unsupported",
            param="dimensions",
        )
    texts, ids = _texts(asked.input, composer, vocabulary)
    vectors = np.ascontiguousarray(embedder.embed(texts), "<f4")
    data = [
        Embedding(
            index=index,
            embedding=base64.b64encode(v.tobytes()).decode() if asked.encoding_format == "base64" else v.tolist(),
        )
        for index, v in enumerate(vectors)
    ]
    return EmbeddingList(
        data=data,
        model=embedder.name,
        usage=EmbeddingUsage(prompt_tokens=ids, total_tokens=ids),
    )


def _texts(
    given: str | Sequence[str] | Sequence[int] | Sequence[list[int]], composer: PromptComposer, vocabulary: int
) -> tuple[list[str], int]:
    """The texts, and how many tokens they are."""
    if isinstance(given, str):
        inputs: list[str | list[int]] = [given]
    elif given and all(isinstance(one, int) for one in given):
        inputs = [[one for one in given if isinstance(one, int)]]
    else:
        inputs = [one for one in given if not isinstance(one, int)]
    if not inputs or not all(inputs):
        raise _bad("an input is empty: leave it out.")
    if len(inputs) > _MOST_INPUTS:
        raise _bad(f"{len(inputs)} inputs are more than {_MOST_INPUTS}: send fewer at a time.")
    texts, count = [], 0
    for one in inputs:
        if isinstance(one, str):
            texts.append(one)
            count += len(composer.tokenizer.encode_text(one))
            continue
        if not 0 <= min(one) <= max(one) < vocabulary:
            raise _bad(f"an input holds token ids outside 0 to {vocabulary - 1}.")
        texts.append(composer.tokenizer.decode(one))
        count += len(one)
    return texts, count


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="input")
