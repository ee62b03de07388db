"""The demonstration's handbook holds facts that the default model can read off, computed in full by Hugging Face."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from epic_engine.model.loader import load_model

from epic_rag.prompt import PromptComposer

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"


def sections() -> dict[str, list[tuple[str, str]]]:
    """Per file, titles (file: heading) and texts of its sections."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(CORPUS.glob("*.md")):
        text = file.read_text(encoding="utf-8")
        title = re.match(r"# (.+)", text)[1]
        parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
        found[file.name] = [(f"{title}: {h}", body.strip()) for h, body in zip(parts[::2], parts[1::2], strict=True)]
    return found


def test_each_answer_stands_in_its_source() -> None:
    for question in json.loads((CORPUS / "questions.json").read_text(encoding="utf-8")):
        text = (CORPUS / question["source"]).read_text(encoding="utf-8").lower()
        assert any(answer in text for answer in question["answers"]), question


@pytest.mark.smollm2
def test_the_default_model_reads_the_facts_off() -> None:
    model, tokenizer, _ = load_model("smollm2", dtype="float32")
    composer = PromptComposer(tokenizer)
    every = sections()
    rng = random.Random(0)
    questions = json.loads((CORPUS / "questions.json").read_text(encoding="utf-8"))
    right = []
    for question in questions:
        (gold, *_) = [s for s in every[question["source"]] if any(a in s[1].lower() for a in question["answers"])]
        others = [rng.choice(s) for name, s in every.items() if name != question["source"]][:3]
        shown = [gold, *others]
        rng.shuffle(shown)
        prompt = composer.compose([composer.encode_chunk(text, title) for title, text in shown], question["question"])
        ids = torch.tensor([[t for part in prompt for t in part]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=2
        )
        answer = tokenizer.decode(out[0][ids.shape[1] :], skip_special_tokens=True).lower()
        right.append(any(a in answer for a in question["answers"]))
    assert sum(right) >= 0.8 * len(questions), [q["question"] for q, ok in zip(questions, right, strict=True) if not ok]
