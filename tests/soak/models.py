"""A model that is replaced by another one in the same place: what the old one compiled must not answer for it."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from epic_engine import ChunkNotFoundError, Engine, FileStore, SamplingParams

from tests.damage import damage
from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched

from .trial import Trial

__all__ = ["upgraded"]

_NEW_TOKENS = 8


def _changed(rng: random.Random) -> Any:
    """The tiny model with one weight changed, or all of them."""
    model = untouched(tiny("llama"))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    parameters = [p for name, p in model.named_parameters() if "layers" in name]
    chosen = parameters if rng.random() < 0.5 else [rng.choice(parameters)]
    with torch.no_grad():
        for parameter in chosen:
            if len(chosen) > 1:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.view(-1)[rng.randrange(parameter.numel())] += 0.5
    return model


def _greedy(model: Any, ids: list[int]) -> list[int]:
    made: list[int] = []
    while len(made) < _NEW_TOKENS:
        made.append(int(plain_logits(model, ids + made)[-1].argmax()))
    return made


def _answer(engine: Engine, chunks: list[list[int]], question: list[int], policy: str) -> tuple[list[int], Any]:
    params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
    while True:
        keys = engine.compile_many(chunks)
        with suppress(ChunkNotFoundError):  # a damaged one; it is not known any more
            done = engine.generate([*keys, question], params, policy=policy)
            return list(done.token_ids), keys


def _opened(folder: Path, store: Path) -> Engine:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Engine(model, store=store, selftest=False)


def upgraded(trial: Trial) -> None:
    """Other weights in the same folder: every chunk is compiled again, and answers are the new model's."""
    hf.utils.logging.disable_progress_bar()
    rng = trial.rng
    folder, store = trial.folder / "model", trial.folder / "store"
    chunks = [[rng.randrange(3, 199) for _ in range(rng.randint(4, 12))] for _ in range(rng.randint(1, 4))]
    question = [rng.randrange(3, 199) for _ in range(5)]
    ids = [token for chunk in chunks for token in chunk] + question
    models = [untouched(tiny("llama")), _changed(rng)]
    trial.outcome.detail = f"{len(chunks)} chunks"
    known: list[Any] = []
    for number, model in enumerate(models):
        model.save_pretrained(folder)
        with _opened(folder, store) as engine:
            keys = [engine.key_of(chunk) for chunk in chunks]
            with closing(FileStore(store)) as other:
                trial.outcome.misses = len(keys) - len(other.known(keys))
                if number and (other.known(keys) or set(keys) & set(known)):
                    trial.outcome.wrong_hits.append("a chunk of the old model")
            text, known = _answer(engine, chunks, question, "full")
            if text != _greedy(model, ids):
                trial.outcome.wrong_hits.append(f"model {number} answers {text}")
            linked, _ = _answer(engine, chunks, question, "legolink:4")
        # What is linked is the same from a store of the model's own, and when a chunk was damaged meanwhile.
        with _opened(folder, trial.folder / f"own-{number}") as engine:
            if _answer(engine, chunks, question, "legolink:4")[0] != linked:
                trial.outcome.wrong_hits.append(f"model {number} answers otherwise beside the other one's chunks")
        damage(store, rng.choice(known).hex)
        with _opened(folder, store) as engine:
            if _answer(engine, chunks, question, "legolink:4")[0] != linked:
                trial.outcome.wrong_hits.append(f"model {number} answers otherwise with a damaged chunk")
    with closing(FileStore(store)) as other:
        trial.outcome.reported = bool(other.verify().quarantined)
        damage(store)
        report = other.verify()
        if len(report.corrupt) != len(list(other.entries())):
            trial.outcome.unreported.append(f"{report}")
