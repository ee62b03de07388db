"""A compiled corpus, and the requests that are drawn from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epic_engine import ChunkKey, Engine
from epic_engine.errors import ConfigError

from epic_rag.benchmarks.arrivals import weighted_sample, zipf_weights
from epic_rag.compiling import compile_chunks
from epic_rag.evaluation.example import EvalExample
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import Embedder

__all__ = ["Chunk", "Corpus", "Request", "compile_corpus"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Chunk:
    """A compiled chunk: its key and its token ids."""

    key: ChunkKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A request as a client sends it.

    Attributes
    ----------
    prompt
        Segments for the engine: the head's key, keys of chunks, token ids of the question.
    chunks
        Places in the corpus of the chunks in the prompt.
    length
        Tokens of the prompt.
    max_tokens
        Tokens to generate, exactly.
    """

    prompt: tuple[tuple[int, ...] | ChunkKey, ...]
    chunks: tuple[int, ...]
    length: int
    max_tokens: int


@dataclass(frozen=True)
class Corpus:
    """Chunks that requests share.

    Attributes
    ----------
    head
        The compiled head of every prompt.
    chunks
        By popularity, the most popular first.
    tails
        Token ids of questions, each with what the chat template puts behind it.
    max_model_len
        Tokens of a prompt and its answer at most.
    """

    head: Chunk
    chunks: tuple[Chunk, ...]
    tails: tuple[tuple[int, ...], ...]
    max_model_len: int

    def request(self, chunks: Sequence[int], tail: int, max_tokens: int) -> Request:
        """The request over some chunks, in their order; the last ones are left out if they do not fit.

        Raises
        ------
        ConfigError
            If not even the question fits.
        """
        question = self.tails[tail % len(self.tails)]
        room = self.max_model_len - len(self.head.token_ids) - len(question) - max_tokens
        if room < 0:
            raise ConfigError(
                f"head, question and {max_tokens} tokens of answer exceed max_model_len={self.max_model_len}: ask for "
                "shorter answers."
            )
        kept: list[int] = []
        for index in chunks:
            room -= len(self.chunks[index].token_ids)
            if room < 0:
                break
            kept.append(index)
        used = [self.chunks[i] for i in kept]
        length = len(self.head.token_ids) + sum(len(c.token_ids) for c in used) + len(question)
        return Request((self.head.key, *(c.key for c in used), question), tuple(kept), length, max_tokens)

    def draw(self, count: int, k: int, max_tokens: int, exponent: float, rng: random.Random) -> list[Request]:
        """``count`` requests over ``k`` different chunks each, in random order, popular ones more often.

        Parameters
        ----------
        count, k
            Requests, and chunks of each; a smaller corpus is used whole.
        max_tokens
            Tokens to generate.
        exponent
            Of the popularity, see :func:`~epic_rag.benchmarks.arrivals.zipf_weights`.
        rng
            Source of all choices.
        """
        weights = zipf_weights(len(self.chunks), exponent)
        k = min(k, len(self.chunks))
        return [
            self.request(weighted_sample(weights, k, rng), rng.randrange(len(self.tails)), max_tokens)
            for _ in range(count)
        ]

    def disjoint(self, sets: int, k: int) -> list[list[int]]:
        """``sets`` lists of ``k`` chunks without a chunk in common, of about equal lengths in tokens.

        Raises
        ------
        ConfigError
            If the corpus is too small even for one chunk a set.
        """
        k = min(k, len(self.chunks) // sets)
        if not k:
            raise ConfigError(
                f"{sets} requests over different chunks need {sets} chunks, the corpus has {len(self.chunks)}: load "
                "more examples, or let fewer requests run at once."
            )
        ordered = sorted(range(len(self.chunks)), key=lambda i: (len(self.chunks[i].token_ids), i))
        start = (len(ordered) - sets * k) // 2
        middle = ordered[start : start + sets * k]
        # Dealt to and fro, so that no set gets the longest of every round.
        rows = [middle[at : at + sets] for at in range(0, len(middle), sets)]
        dealt = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
        return [[row[i] for row in dealt] for i in range(sets)]

    def pieces(self, count: int, tail: int, max_tokens: int) -> list[tuple[int, ...]]:
        """Token ids of up to ``count`` short chunks, cut from the corpus so that one request can hold them all."""
        room = self.max_model_len - len(self.head.token_ids) - len(self.tails[tail]) - max_tokens
        size = min(max(room // count, 1), max(len(c.token_ids) for c in self.chunks))
        text = [token for chunk in self.chunks for token in chunk.token_ids]
        cut = [tuple(text[at : at + size]) for at in range(0, len(text) - size + 1, size)]
        return list(dict.fromkeys(cut))[: min(count, room // size)]


def compile_corpus(
    engine: Engine,
    examples: Sequence[EvalExample],
    *,
    context: str = "isolated",
    seed: int = 0,
    embedder: Embedder | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Compile the documents of a data set as a corpus.

    Parameters
    ----------
    engine
        With a tokenizer.
    examples
        Their documents, retrieved or not, become chunks (equal ones count once), their questions the questions.
    context
        Compile context.
    seed
        Decides which chunks are popular.
    embedder
        Needed for ``neighbours:n``.
    progress
        Called with tokens done and to do.

    Raises
    ------
    ConfigError
        If there is no document, or the context cannot be used.
    """
    composer = PromptComposer(engine.tokenizer)
    texts = {composer.encode_chunk(text): text for e in examples for text in (*e.documents, *e.others)}
    if not texts:
        raise ConfigError("the data set has no documents: choose another one.")
    parts = list(texts)
    random.Random(f"{seed}/popularity").shuffle(parts)
    keys = compile_chunks(
        engine, parts, [texts[p] for p in parts], context, composer=composer, embedder=embedder, progress=progress
    )
    return Corpus(
        head=Chunk(engine.compile(composer.head_ids, "isolated"), composer.head_ids),
        chunks=tuple(Chunk(key, part) for key, part in zip(keys, parts, strict=True)),
        tails=tuple(dict.fromkeys(composer.tail_ids(e.question) for e in examples)),
        max_model_len=engine.max_model_len,
    )
