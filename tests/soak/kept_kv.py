"""What int8 chunks change against bfloat16 ones: ``python -m tests.soak.kept_kv --dataset FILE [--json OUT]``.

Chunks are compiled in bfloat16 once, in the default context, and linked with the default policy as they are and as int8
gives them back; everything else is computed in float32, whose rounding moves no answer. The answer of the first is then
predicted by both (teacher forcing). A stopped run goes on where it was with the same OUT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from epic_engine import ChunkKey, Engine, MemoryStore, SamplingParams
from epic_engine.storage.payload import rounded
from rich.progress import track

from epic_rag.defaults import BUILT_IN
from epic_rag.evaluation.datasets import load
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.stores import DataSetStores
from epic_rag.prompt import PromptComposer
from epic_rag.retrieval import MiniLMEmbedder


class Comparison:
    """One model, compiling in bfloat16 and linking in float32."""

    def __init__(self, examples: Sequence[EvalExample], tokens: int) -> None:
        self._tokens = tokens
        self._compiler = Engine("smollm2", dtype="bfloat16", selftest=False)
        self._store = MemoryStore()
        self._linker = Engine("smollm2", dtype="float32", selftest=False, store=self._store, policy=BUILT_IN.policy)
        self._composer = PromptComposer(self._compiler.tokenizer)
        self._stores = DataSetStores(self._compiler, self._composer, MiniLMEmbedder())
        self._stores.gather(examples)

    def _entered(self, key: ChunkKey, kept: str) -> ChunkKey:
        """A compiled chunk for the linker, as it is kept."""
        chunk, info = self._compiler.chunk(key), self._compiler.store.info(key)
        assert info is not None
        kv = rounded(chunk.kv, kept).float()
        name = ChunkKey(hashlib.sha256(f"{key}{kept}".encode()).hexdigest())
        mine = replace(
            info, key=name, fingerprint=self._linker.fingerprint, encoding="raw", nbytes=kv.nbytes, depends=()
        )
        self._store.put([(mine, kv)])
        return name

    def run(self, example: EvalExample) -> dict[str, Any]:
        """Tokens of the answer, how many both predict alike, and the mean KL divergence."""
        ids = [self._composer.encode_chunk(text) for text in example.documents]
        head = self._compiler.compile(self._composer.head_ids, "isolated")
        keys = [head, *self._stores.keys(example, ids, BUILT_IN.context)]
        answer: tuple[int, ...] = ()
        logits = []
        for kept in ("raw", "int8"):
            linked = [self._entered(key, kept) for key in keys]
            prompt = [*linked, self._composer.tail_ids(example.question)]
            if not answer:
                params = SamplingParams(max_tokens=self._tokens, ignore_eos=True)
                answer = self._linker.generate(prompt, params).token_ids
            logits.append(self._linker.score(prompt, answer))
            self._linker.forget(linked)
        self._compiler.forget(keys)
        before, after = (one.log_softmax(-1) for one in logits)
        same = (before.argmax(-1) == after.argmax(-1)).sum()
        kl = (before.exp() * (before - after)).sum(-1).mean()
        return {"id": example.example_id, "tokens": len(answer), "same": int(same), "kl": float(kl)}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", required=True, help="as epic-rag eval takes them")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="a line for each example")
    options = parser.parse_args()
    examples = load(options.dataset, limit=options.limit)
    found: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        found = [json.loads(line) for line in options.json.read_text(encoding="utf-8").splitlines()]
    known = {record["id"] for record in found}
    left = [example for example in examples if example.example_id not in known]
    comparison = Comparison(examples, options.tokens)
    with torch.inference_mode():
        for example in track(left, "examples"):
            found.append(comparison.run(example))
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(found[-1]) + "\n")
    tokens, same = sum(r["tokens"] for r in found), sum(r["same"] for r in found)
    kl = sum(r["kl"] for r in found) / len(found)
    print(f"{len(found)} examples, {tokens} tokens, {tokens - same} differ: {100 * same / tokens:.2f} %, KL {kl:.5f}")


if __name__ == "__main__":
    main()
