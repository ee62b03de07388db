"""Tuning a store, its defaults, and moving it to another compile context, on the tiny stack."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError, Engine, SamplingParams
from epic_engine.compiler import Compiler

from epic_rag import EpicRAG
from epic_rag.defaults import BUILT_IN, LinkDefaults
from epic_rag.errors import RagError
from epic_rag.evaluation import tuning
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.tuning import examples_from, tune, write_questions
from tests.rag.conftest import Run
from tests.rag.stack import TEXTS, model, open_rag

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
QUESTIONS = ["When does the ferry leave?", "What does rye bread cost?", "Who is the harbour master?"]


def forms(rag: EpicRAG) -> dict[str, list[str]]:
    """Contexts in which each chunk is there, by chunk."""
    return {
        c.chunk_id: sorted(f.context for f in rag.engine.forms(c.token_ids))
        for d in rag.registry.documents()
        for c in rag.registry.chunks(d.doc_id)
    }


def contexts_in_use(rag: EpicRAG) -> set[str]:
    used = rag.registry.all_keys()
    return {e.context for e in rag.engine.store.entries() if e.key.hex in used}


@pytest.mark.parametrize("bar", [0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 1.0])
def test_the_cheapest_that_is_faithful_enough_is_chosen(tmp_path: Path, bar: float) -> None:
    with open_rag(tmp_path) as rag:
        rag.add(texts=TEXTS)
        before = {e.key for e in rag.engine.store.entries()}
        found = tune(
            rag,
            examples_from(rag, QUESTIONS, 3),
            policies=("naive", "legolink:4", "legolink:16", "legolink:all"),
            contexts=("neighbours:1", "isolated"),
            min_agreement=bar,
            max_tokens=8,
        )
        after = {e.key for e in rag.engine.store.entries()}
    assert before == after
    measured: dict[tuple[str, str], list[Any]] = {}
    for result in found.results:
        for arm in result.arms:
            measured.setdefault((arm.policy, arm.context), []).append(arm)
    mean = {name: sum(a.agreement for a in arms) / len(arms) for name, arms in measured.items()}
    rows = {name: sum(a.rows for a in arms) / len(arms) for name, arms in measured.items()}
    good = [name for name in measured if mean[name] >= bar]
    assert mean["full", ""] == 1
    assert (found.chosen.policy, found.chosen.context) in good
    assert rows[found.chosen.policy, found.chosen.context] == min(rows[name] for name in good)
    if bar == 0:  # equal rows: the context that is cheaper to compile
        assert (found.chosen.policy, found.chosen.context) == ("naive", "isolated")
    assert [a.rows for a in found.curve] == sorted(rows.values())


def test_prompts_are_those_of_the_store(tmp_path: Path) -> None:
    with open_rag(tmp_path, system_prompt="Be brief.") as rag:
        rag.add(texts=TEXTS)
        found = tune(rag, examples_from(rag, QUESTIONS, 2), policies=("naive",), contexts=("isolated",), max_tokens=5)
        for question, result in zip(QUESTIONS, found.results, strict=True):
            for arm in result.arms:
                asked = rag.ask(question, k=2, policy=arm.policy, sampling=SamplingParams(max_tokens=5))
                assert (arm.answer, arm.prompt) == (asked.text, asked.stats.prompt)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[str] = []
    real = Engine.link
    monkeypatch.setattr(Engine, "link", lambda self, p, **o: (linked.append(str(o["policy"])), real(self, p, **o))[1])

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with open_rag(tmp_path / "a") as rag:
        rag.add(texts=TEXTS)
        examples = examples_from(rag, QUESTIONS, 2)
        options: dict[str, Any] = {"policies": ("naive",), "contexts": ("isolated",), "records": tmp_path / "kept"}
        with pytest.raises(KeyboardInterrupt):
            tune(rag, examples, progress=stop, **options)
        linked.clear()
        again = tune(rag, examples, **options)
        assert linked == ["full", "naive"]
        assert len(again.results) == 3
        # Other documents are other neighbours: nothing is taken over.
        rag.add(texts={"mill": "The mill grinds rye."})
        linked.clear()
        tune(rag, examples, **options)
        assert len(linked) == 6


def test_defaults_are_kept_per_model_and_used(tmp_path: Path) -> None:
    with open_rag(tmp_path, context="auto") as rag:
        assert (rag.compiler.name, str(rag.policy)) == (BUILT_IN.context, BUILT_IN.policy)
        rag.add(texts=TEXTS)
        assert rag.use(LinkDefaults("legolink:3", "isolated")) == len(rag.registry.all_keys())
        assert rag.ask(QUESTIONS[0], sampling=GREEDY).stats.policy == "legolink:3"
        assert rag.use(LinkDefaults("legolink:3", "isolated")) == 0
        with pytest.raises(ConfigError, match="legolink:k"):
            rag.use(LinkDefaults("magic", "isolated"))
        with pytest.raises(ConfigError, match="neighbours:n"):
            rag.use(LinkDefaults("naive", "magic"))
    with open_rag(tmp_path, context="auto") as rag:
        assert (rag.compiler.name, str(rag.policy)) == ("isolated", "legolink:3")
    with open_rag(tmp_path, context="head", policy="naive") as rag:
        assert (rag.compiler.name, str(rag.policy)) == ("head", "naive")
    with open_rag(tmp_path, context="auto", model=model(seed=8)) as rag:
        assert (rag.compiler.name, str(rag.policy)) == (BUILT_IN.context, BUILT_IN.policy)


@pytest.mark.parametrize("target", ["isolated", "head", "neighbours:1", "neighbours:2", "sink:2"])
def test_a_store_moved_to_a_context_is_as_if_made_in_it(tmp_path: Path, target: str) -> None:
    start = "neighbours:1" if target != "neighbours:1" else "isolated"
    texts = {**TEXTS, "copy": TEXTS["bakery"]}
    with open_rag(tmp_path / "moved", context=start) as rag:
        rag.add(texts=texts)
        rag.use(LinkDefaults("naive", target))
        moved = [rag.ask(q, k=4, sampling=GREEDY).text for q in QUESTIONS]
        held, used = forms(rag), contexts_in_use(rag)
        assert rag.engine.store.verify().clean
        known = {e.key.hex for e in rag.engine.store.entries()}
        assert rag.registry.all_keys() <= known
    with open_rag(tmp_path / "fresh", context=target, policy="naive") as rag:
        rag.add(texts=texts)
        assert [rag.ask(q, k=4, sampling=GREEDY).text for q in QUESTIONS] == moved
        assert (forms(rag), contexts_in_use(rag)) == (held, used)


def test_an_interrupted_move_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    real = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self, c, *rest: (compiled.append(len(c)), real(self, c, *rest))[1])

    def stop(stage: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with open_rag(tmp_path, rows_per_step=32) as rag:
        rag.add(texts=TEXTS)
        chunks = len(rag.registry.all_keys())
        with pytest.raises(KeyboardInterrupt):
            rag.use(LinkDefaults("naive", "head"), progress=stop)
        asked = rag.ask(QUESTIONS[0], k=30, sampling=GREEDY)  # half in one context, half in the other
        assert asked.stats.linked > asked.stats.prompt / 2
        compiled.clear()
        rag.use(LinkDefaults("naive", "head"))
        assert 0 < sum(compiled) < chunks
        assert contexts_in_use(rag) == {"head"}


def test_head_forms_are_kept_or_not(tmp_path: Path) -> None:
    with open_rag(tmp_path / "kept", context="neighbours:1") as rag:
        rag.add(texts=TEXTS)
        whole = sum(e.nbytes for e in rag.engine.store.entries())
        answer = rag.ask(QUESTIONS[0], sampling=GREEDY).text
    with open_rag(tmp_path / "spare", context="neighbours:1", keep_head_forms=False) as rag:
        rag.add(texts=TEXTS)
        assert {tuple(f) for f in forms(rag).values()} == {("neighbours:1",)}
        assert sum(e.nbytes for e in rag.engine.store.entries()) == whole / 2
        assert rag.ask(QUESTIONS[0], sampling=GREEDY).text == answer
        rag.add(texts={"mill": "The mill at the ferry grinds rye for the bakery."})
        assert {tuple(f) for f in forms(rag).values()} == {("neighbours:1",)}
        # A neighbour goes: what saw it is made anew from what is left.
        rag.delete("ferry")
        assert [] in forms(rag).values()
        rag.ask(QUESTIONS[0], k=30, sampling=GREEDY)
        rag.add(texts={"quay": "The quay is long."})
        assert {tuple(f) for f in forms(rag).values()} == {("neighbours:1",)}
        assert contexts_in_use(rag) == {"neighbours:1"}


class _Writing:
    """Lets a model that knows no words write questions, and counts how often it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
        self.asked = 0
        real = Engine.generate

        def generate(engine: Engine, prompt: Any, *rest: Any, **options: Any) -> Any:
            done = real(engine, prompt, *rest, **options)
            object.__setattr__(done, "text", texts[self.asked % len(texts)])
            self.asked += 1
            return done

        monkeypatch.setattr(Engine, "generate", generate)


def test_questions_are_cut_out_of_what_the_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_rag(tmp_path) as rag:
        with pytest.raises(RagError, match="ingest some first"):
            write_questions(rag, 3)
        rag.add(texts=TEXTS)
        writer = _Writing(
            monkeypatch, "Sure! Question: Who bakes? It is", "no question", "\n\nWhat is late? And why?", "?"
        )
        kept = tmp_path / "deep" / "questions.jsonl"
        assert write_questions(rag, 4, kept=kept) == ["Who bakes?", "What is late?"]
        assert writer.asked == 4
        kept.write_text(kept.read_text()[:-5])
        assert write_questions(rag, 4, kept=kept) == ["Who bakes?", "What is late?"]
        assert writer.asked == 5  # the torn line's
        assert len(write_questions(rag, 10**6)) == 2
    monkeypatch.undo()
    with open_rag(tmp_path) as rag, monkeypatch.context() as patch:
        _Writing(patch, "nothing to ask")
        with pytest.raises(RagError, match="--dataset"):
            write_questions(rag, 3)


def test_answers_that_are_given_are_scored(tmp_path: Path) -> None:
    with open_rag(tmp_path) as rag:
        rag.add(texts=TEXTS)
        asked = [EvalExample("mine", ("old",), QUESTIONS[1], ("three crowns",), corpus="x", others=("y",))]
        (example,) = examples_from(rag, asked, 2)
        assert example.documents == tuple(s.text for s in rag.retrieve(QUESTIONS[1], 2))
        found = tune(rag, [example], policies=("naive",), contexts=("isolated",))
    assert found.summary.arms[0].score.mean in (0, 1)
    assert json.dumps(tuning.as_dict(found), allow_nan=False)


def test_bad_bars_are_refused(tmp_path: Path) -> None:
    with open_rag(tmp_path) as rag:
        rag.add(texts=TEXTS)
        with pytest.raises(RagError, match=r"0\.99"):
            tune(rag, examples_from(rag, QUESTIONS, 2), min_agreement=99)
        with pytest.raises(RagError, match="max_model_len"):
            tune(rag, [EvalExample("long", ("word " * 3000,), "Why?")], policies=("naive",), contexts=("isolated",))


def kv_bytes(stats: dict[str, Any]) -> Counter[str]:
    """Bytes of KV by compile context, of what ``store stats`` says."""
    found: Counter[str] = Counter()
    for group in stats["groups"]:
        found[group["context"]] += group["kv_bytes"]
    return found


def test_command(run: Run, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in TEXTS.items():
        (docs / f"{name}.txt").write_text(text)
    store, questions, out = tmp_path / "store", tmp_path / "questions.txt", tmp_path / "out.json"
    assert run("ingest", str(docs), "--store", str(store), "--max-chunk-tokens", "64")[0] == 0
    questions.write_text("\n".join(QUESTIONS))
    common = ("tune", "--store", str(store), "--dataset", str(questions), "-k", "2", "--policies", "naive,legolink:2")
    code, printed, _ = run(*common, "--min-agreement", "0", "--dry-run")
    assert code == 0
    assert "now uses" not in printed
    stats = json.loads(run("store", "stats", "--store", str(store), "--json")[1])
    assert kv_bytes(stats)[BUILT_IN.context] == kv_bytes(stats)["head"] > 0

    code, printed, _ = run(*common, "--min-agreement", "0", "--json", str(out))
    assert code == 0
    assert "now uses naive and isolated" in printed
    assert json.loads(out.read_text())["chosen"] == {"policy": "naive", "context": "isolated"}
    stats = json.loads(run("store", "stats", "--store", str(store), "--json")[1])
    assert kv_bytes(stats) == {"isolated": stats["kv_bytes"]}
    asked = json.loads(run("ask", "Who?", "--store", str(store), "--max-tokens", "2", "--json")[1])
    assert asked["policy"] == "naive"

    code, printed, _ = run(*common, "--min-agreement", "1", "--limit", "1")
    assert code == 0
    code, _, error = run("tune", "--store", str(store), "--dataset", str(tmp_path / "none.txt"))
    assert code == 1
    assert "cannot be read" in error
    assert run("tune", "--store", str(tmp_path / "nowhere"))[0] == 2


def test_removing_a_document_removes_what_saw_it(run: Run, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    docs.mkdir()
    (docs / "a.txt").write_text("The ferry leaves at noon.")
    (docs / "b.txt").write_text("The ferry leaves at dusk.")
    run("ingest", str(docs), "--store", str(store), "--context", "neighbours:1")
    assert run("store", "rm", str(docs / "a.txt"), "--store", str(store))[0] == 0
    stats = json.loads(run("store", "stats", "--store", str(store), "--json")[1])
    assert "neighbours:1" not in kv_bytes(stats)
    assert stats["compiled_chunks"] == 1
