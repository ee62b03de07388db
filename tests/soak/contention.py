"""Answers beside processes that keep cores busy: ``python -m tests.soak.contention --dataset FILE [--hogs 1]``.

Prints how long requests over six chunks took alone, beside the others, and beside them without the watch that has
workers sleep while threads wait for cores (``epic_engine.contention``).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from epic_engine import Engine, SamplingParams

from epic_rag.benchmarks.serve_corpus import Corpus, compile_corpus
from epic_rag.evaluation.datasets import load
from epic_rag.tokenization import SegmentTokenizer


def seconds_of(engine: Engine, corpus: Corpus, requests: int, most: float) -> list[float]:
    """Seconds of each request; no more are sent after ``most`` seconds, and one that takes longer is given up."""
    rng, begin, found = random.Random(0), time.perf_counter(), list[float]()
    while len(found) < requests and time.perf_counter() - begin < most:
        (request,) = corpus.draw(1, 6, 2, 1.0, rng)
        at = time.perf_counter()
        engine.generate(request.prompt, SamplingParams(max_tokens=2), timeout=most)
        found.append(time.perf_counter() - at)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--hogs", type=int, default=1, help="processes that keep a core busy each")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--most", type=float, default=120.0, help="seconds after which a part is over")
    chosen = parser.parse_args(arguments)
    with Engine("smollm2", policy="query_aware:0.1") as engine, ExitStack() as stack:
        count = SegmentTokenizer(engine.tokenizer).encode_text
        examples = load(chosen.dataset, limit=2, seed=0, count_tokens=lambda text: len(count(text)))
        corpus = compile_corpus(engine, examples, context="isolated", seed=0)
        seconds_of(engine, corpus, 3, chosen.most)  # warm-up

        def report(name: str) -> None:
            found = seconds_of(engine, corpus, chosen.requests, chosen.most)
            print(
                f"{name}: {len(found)} requests, median {statistics.median(found):.2f} s, longest {max(found):.2f} s",
                flush=True,
            )

        report("alone")
        for _ in range(chosen.hogs):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(hog.kill)
        report(f"beside {chosen.hogs}")
        engine._loop._watch.close()
        report(f"beside {chosen.hogs}, without the watch")


if __name__ == "__main__":
    main()
