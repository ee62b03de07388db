"""The parts of ``bench serve``. Each yields its figures anew whenever it has measured something more."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from epic_engine import ChunkKey
from epic_engine.errors import ConfigError

from epic_rag.benchmarks.arrivals import poisson_arrivals
from epic_rag.benchmarks.serve_clients import Clients, Outcome
from epic_rag.benchmarks.serve_corpus import Corpus, Request
from epic_rag.benchmarks.serve_figures import (
    closed_figures,
    counts,
    decode_rate,
    load_figures,
    median_ratio,
    quantiles,
    ratios_to,
)

__all__ = ["PARTS", "ServeSettings", "steps", "turned"]

_BASES = ("full", "prefix")
_HELD_TOKENS = 512  # long enough that the first request still runs when the last one has begun
_POLL_S = 0.002
_MOST_PAUSE_S = 0.05


@dataclass(frozen=True)
class ServeSettings:
    """What ``bench serve`` does.

    Attributes
    ----------
    policies
        String forms.
    parts
        Names in :data:`PARTS`.
    rates
        Mean arrivals a second, for ``load``.
    tokens
        Lengths of answers, for ``load``; ``saturation`` takes the first.
    requests
        Requests for each policy at each rate and in each round.
    k, exponent
        Chunks of a request, and how unequal their popularity is.
    concurrency
        Requests at once in ``saturation``, ``decode`` and ``memory``.
    rounds
        Rounds of ``saturation``, ``decode`` and ``beside``.
    decode_tokens
        Lengths of answers in ``decode``.
    beside_chunks, short_requests
        Chunks of the long requests, and short requests a round alone and beside them.
    seed
        Of all draws.
    """

    policies: tuple[str, ...] = ("full", "prefix", "legolink:16", "query_aware:0.1")
    parts: tuple[str, ...] = ("load", "saturation", "decode", "beside", "memory")
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    tokens: tuple[int, ...] = (16,)
    requests: int = 32
    k: int = 6
    exponent: float = 1.0
    concurrency: int = 8
    rounds: int = 3
    decode_tokens: int = 128
    beside_chunks: int = 64
    short_requests: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ConfigError(f"parts={','.join(self.parts)!r}: choose from {', '.join(PARTS)}.")
        if not (self.policies and self.rates and self.tokens) or min(self.rates) <= 0:
            raise ConfigError("give at least one policy, one rate above 0 and one number of output tokens.")
        numbers = (*self.tokens, self.requests, self.k, self.concurrency, self.rounds, self.beside_chunks)
        if min(*numbers, self.short_requests) < 1 or self.decode_tokens < 2:
            raise ConfigError("numbers of requests, chunks, rounds and tokens must be 1 or more, decode_tokens 2.")
        if self.concurrency < 2 and "memory" in self.parts:
            raise ConfigError("memory compares one request with several: give a concurrency of 2 or more.")

    @property
    def linking(self) -> tuple[str, ...]:
        """Policies that link compiled chunks."""
        return tuple(p for p in self.policies if p not in _BASES)

    def capped(self) -> ServeSettings:
        """A small run of the same kind: fewer rates, rounds, requests, chunks and tokens."""
        return ServeSettings(
            **{
                **asdict(self),
                "rates": self.rates[:2],
                "tokens": self.tokens[:1],
                "requests": min(self.requests, 8),
                "concurrency": min(self.concurrency, 4),
                "rounds": 1,
                "decode_tokens": min(self.decode_tokens, 32),
                "beside_chunks": min(self.beside_chunks, 32),
                "short_requests": min(self.short_requests, 6),
            }
        )


def turned(policies: Sequence[str], by: int) -> list[str]:
    """The policies in an order that turns, so that none always comes first."""
    at = by % max(len(policies), 1)
    return [*policies[at:], *policies[:at]]


def _rng(settings: ServeSettings, *what: object) -> random.Random:
    return random.Random("/".join(map(str, (settings.seed, *what))))


def load(clients: Clients, corpus: Corpus, settings: ServeSettings) -> Iterator[list[dict[str, Any]]]:
    """Requests that arrive at given rates, however many are waiting: one cell a length, rate and policy."""
    cells: list[dict[str, Any]] = []
    number = 0
    for tokens in settings.tokens:
        for rate in settings.rates:
            rng = _rng(settings, "load", tokens, f"{rate:g}")
            requests = corpus.draw(settings.requests, settings.k, tokens, settings.exponent, rng)
            arrivals = poisson_arrivals(rate, settings.requests, rng)
            for policy in turned(settings.policies, number):
                outcomes = clients.open_loop(requests, arrivals, policy)
                figures = load_figures(outcomes, outcomes[0].due - arrivals[0])
                cells.append({"policy": policy, "rate": rate, "tokens": tokens, **figures})
                cells[-1]["requests"] = [
                    {
                        "arrival_s": at,
                        "ttft_s": o.ttft if o.times else None,
                        "per_token_s": o.per_token,
                        "prompt": o.prompt,
                        "reused": o.reused,
                        "state": o.state,
                    }
                    for at, o in zip(arrivals, outcomes, strict=True)
                ]
                yield cells
            number += 1


def saturation(clients: Clients, corpus: Corpus, settings: ServeSettings) -> Iterator[dict[str, dict[str, Any]]]:
    """As many requests a second as the engine can serve, with the same number always running."""
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(settings.rounds):
        # New requests each round: the same prompts again would be whole hits of a prefix cache.
        rng = _rng(settings, "saturation", number)
        requests = corpus.draw(settings.requests, settings.k, settings.tokens[0], settings.exponent, rng)
        for policy in turned(settings.policies, number):
            rounds[policy].append(closed_figures(clients.closed_loop(requests, policy, settings.concurrency)))
            yield _saturation(rounds, settings.policies)


def _saturation(rounds: dict[str, list[dict[str, Any]]], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    whole = min(len(rounds[p]) for p in policies)  # in an unfinished round, policies cannot be compared
    rps = {p: [r["rps"] for r in rounds[p][:whole]] for p in policies}
    return {
        policy: {
            "rps": statistics.median(r["rps"] for r in found),
            "output_tokens_s": statistics.median(r["output_tokens_s"] for r in found),
            **ratios_to(_BASES, rps, policy),
            **{state: sum(r[state] for r in found) for state in ("done", "refused", "failed")},
            "rounds": found,
        }
        for policy in policies
        if (found := rounds[policy])
    }


def decode(clients: Clients, corpus: Corpus, settings: ServeSettings) -> Iterator[dict[str, dict[str, Any]]]:
    """Decoding over the same chunks, in other orders, against decoding over different ones of the same length."""
    sets = corpus.disjoint(settings.concurrency, settings.k)
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for number in range(settings.rounds):
        rng = _rng(settings, "decode", number)
        same = sets[number % len(sets)]
        chosen = {"same": [rng.sample(same, len(same)) for _ in sets], "disjoint": sets}
        for policy in turned(settings.linking, number):
            for kind in turned(tuple(chosen), number):
                requests = [corpus.request(c, i, settings.decode_tokens) for i, c in enumerate(chosen[kind])]
                outcomes = clients.closed_loop(requests, policy, len(requests))
                rate, together = decode_rate(outcomes)
                rounds[policy][kind].append({"tokens_s": rate, "together": together, **counts(outcomes)})
            yield {p: _decode(kinds) for p, kinds in rounds.items()}


def _decode(kinds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {kind: [r["tokens_s"] for r in found] for kind, found in kinds.items()}
    found = [r for rounds in kinds.values() for r in rounds]
    return {
        "same_tokens_s": statistics.median(rates["same"]),
        "disjoint_tokens_s": statistics.median(rates["disjoint"]),
        "ratio": median_ratio(rates["same"], rates["disjoint"]),
        "together": all(r["together"] for r in found),
        **{state: sum(r[state] for r in found) for state in ("done", "refused", "failed")},
        "rounds": kinds,
    }


def beside(clients: Clients, corpus: Corpus, settings: ServeSettings) -> Iterator[dict[str, dict[str, Any]]]:
    """Short requests alone, and while requests that link many chunks run one after another."""
    pieces = corpus.pieces(settings.beside_chunks, 0, 1)
    keys = clients.engine.compile_many(pieces, "isolated")
    tail = corpus.tails[0]
    length = len(corpus.head.token_ids) + sum(map(len, pieces)) + len(tail)
    smallest = min(range(len(corpus.chunks)), key=lambda i: len(corpus.chunks[i].token_ids))

    def long_request(rng: random.Random) -> Request:
        order: list[ChunkKey] = rng.sample(keys, len(keys))
        return Request((corpus.head.key, *order, tail), (), length, 1)

    alone: dict[str, list[Outcome]] = defaultdict(list)
    busy: dict[str, list[Outcome]] = defaultdict(list)
    linked: dict[str, list[Outcome]] = defaultdict(list)
    for number in range(settings.rounds):
        requests = [corpus.request([smallest], i, 1) for i in range(settings.short_requests)]
        for policy in turned(settings.linking, number):
            rng = _rng(settings, "beside", number)
            alone[policy] += _paced(clients, requests, policy, rng)
            with clients.crew() as start:
                start(partial(_over_and_over, clients, partial(long_request, rng), policy, linked[policy]))
                busy[policy] += _paced(clients, requests, policy, _rng(settings, "beside", number, "busy"))
                clients.cancel()
            yield {
                p: _beside(alone[p], busy[p], linked[p], chunks=len(keys), prompt=length)
                for p in settings.linking
                if busy[p]
            }


def _paced(clients: Clients, requests: Sequence[Request], policy: str, rng: random.Random) -> list[Outcome]:
    """Send requests one after another, with pauses, so that they fall on all moments of what else is running."""
    found = []
    for request in requests:
        clients.timeline.sleep_until(clients.timeline.now() + rng.uniform(0, _MOST_PAUSE_S))
        found.append(clients.ask(request, policy))
    return found


def _over_and_over(clients: Clients, make: Callable[[], Request], policy: str, found: list[Outcome]) -> None:
    while not clients.cancelled:
        found.append(clients.ask(make(), policy))
        if found[-1].state != "done":
            return


def _beside(
    alone: Sequence[Outcome], busy: Sequence[Outcome], linked: Sequence[Outcome], *, chunks: int, prompt: int
) -> dict[str, Any]:
    quiet, loud = (quantiles([o.ttft for o in found if o.state == "done"]) for found in (alone, busy))
    times = [o.ttft for o in linked if o.state == "done"]
    return {
        "alone_s": quiet,
        "beside_s": loud,
        "ratio": {name: loud[name] / quiet[name] for name in quiet if quiet[name] and name in loud},
        "chunks": chunks,
        "prompt_tokens": prompt,
        "long_ttft_s": statistics.median(times) if times else None,
        "long": counts(linked),
        **counts([*alone, *busy]),
    }


def memory(clients: Clients, corpus: Corpus, settings: ServeSettings) -> Iterator[dict[str, dict[str, Any]]]:
    """Bytes that further requests add over the chunks of a first one, as a share of private copies of their KV."""
    found: dict[str, dict[str, Any]] = {}
    tokens = min(_HELD_TOKENS, corpus.max_model_len // 2)
    rng = _rng(settings, "memory")
    chunks = list(corpus.draw(1, settings.k, tokens, settings.exponent, rng)[0].chunks)
    requests = [corpus.request(rng.sample(chunks, len(chunks)), i, tokens) for i in range(settings.concurrency)]
    for policy in settings.policies:
        outcomes = [Outcome(0.0) for _ in requests]
        with clients.crew() as start:
            start(partial(_hold, clients, requests[0], policy, outcomes[0]))
            _wait(clients, outcomes[:1])
            before = clients.held_bytes()
            for request, outcome in zip(requests[1:], outcomes[1:], strict=True):
                start(partial(_hold, clients, request, policy, outcome))
            _wait(clients, outcomes)
            after = clients.held_bytes()
            # One that has ended holds nothing any more: then the difference says nothing.
            held = [o for o in outcomes if o.state == "running"]
            generated = sum(len(o.times) for o in held)
            clients.cancel()
        copy = statistics.mean(r.length for r in requests[1:]) * clients.engine.spec.kv_bytes_per_token
        entry: dict[str, Any] = {
            "requests": len(requests),
            "prompt_tokens": statistics.mean(r.length for r in requests),
            "copy_bytes": copy,
            "held": len(held),
            "generated": generated,
            "before_bytes": before,
            "after_bytes": after,
            **counts(outcomes),
        }
        if len(held) == len(requests):
            entry["added_bytes"] = (after - before) / (len(requests) - 1)
            entry["share"] = entry["added_bytes"] / copy
        found[policy] = entry
        yield found


def _hold(clients: Clients, request: Request, policy: str, outcome: Outcome) -> None:
    clients.ask(request, policy, outcome=outcome)


def _wait(clients: Clients, outcomes: Sequence[Outcome]) -> None:
    """Until each has its first token, or has ended without."""
    while any(o.state == "running" and not o.times for o in outcomes):
        clients.timeline.sleep_until(clients.timeline.now() + _POLL_S)


PARTS: dict[str, Callable[[Clients, Corpus, ServeSettings], Iterator[Any]]] = {
    "load": load,
    "saturation": saturation,
    "decode": decode,
    "beside": beside,
    "memory": memory,
}
"""The parts by name, in the order in which they run."""


def steps(settings: ServeSettings) -> dict[str, int]:
    """How often each chosen part yields."""
    policies, linking = len(settings.policies), len(settings.linking)
    each = {
        "load": len(settings.tokens) * len(settings.rates) * policies,
        "saturation": settings.rounds * policies,
        "decode": settings.rounds * linking,
        "beside": settings.rounds * linking,
        "memory": policies,
    }
    return {part: each[part] for part in PARTS if part in settings.parts}
