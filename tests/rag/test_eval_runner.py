"""The runner on a tiny model: against itself, resumed, interrupted, and leaving nothing behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from epic_engine import ConfigError, Engine, EngineClosedError, SamplingParams

from epic_rag.errors import RagError
from epic_rag.evaluation.engines import engines_of
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.records import ArmResult, ExampleResult
from epic_rag.evaluation.runner import Arm, EvalSettings, Evaluation
from epic_rag.evaluation.summary import summarise
from tests.rag.stack import TEXTS, BagOfWords, model, tokenizer

DOCUMENTS = tuple(TEXTS.values())
EXAMPLES = [
    EvalExample(
        f"e{i}",
        DOCUMENTS[i:] + DOCUMENTS[:i],
        f"What about number {i}?",
        ("nine crowns",) if i != 2 else (),
        scorer="contains",
        group={"turn": str(i % 2)},
    )
    for i in range(4)
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(model(), tokenizer=tokenizer(), selftest=False) as made:
        yield made


def settings(*policies: str, contexts: tuple[str, ...] = ("isolated",), **options: Any) -> EvalSettings:
    return EvalSettings("tiny", policies, contexts, max_tokens=options.pop("max_tokens", 6), **options)


@pytest.fixture
def calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()
    for name in ("link",):
        real = getattr(engine, name)

        def counting(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _real(*args, **kwargs)

        monkeypatch.setattr(engine, name, counting)
    return counted


def test_recomputing_everything_is_full_and_less_is_not(engine: Engine) -> None:
    evaluation = Evaluation(
        engine,
        settings("full", "naive", "legolink:100000", contexts=("isolated", "head", "sink:2", "neighbours:1")),
        embedder=BagOfWords(),
    )
    results = evaluation.run(EXAMPLES)
    assert [a.policy for a in results[0].arms] == ["full"] + ["naive", "legolink:100000"] * 4
    for result in results:
        full = result.arms[0]
        assert (full.kl, full.agreement, full.first_token, full.rows) == (0, 1, True, full.prompt)
        for arm in result.arms[1:]:
            assert arm.prompt == full.prompt
            if arm.policy == "naive":
                assert arm.kl > 1e-6
                assert arm.rows < full.rows / 4
                assert arm.recomputed == 0
            else:
                assert 0 <= arm.kl < 1e-6
                assert (arm.agreement, arm.answer) == (1, full.answer)
                assert (arm.nll is None) == (full.nll is None)
                assert arm.nll is None or arm.nll == pytest.approx(full.nll, rel=1e-4)


def test_full_on_compiled_chunks_equals_full_on_plain_tokens(engine: Engine) -> None:
    evaluation = Evaluation(engine, settings("full"))
    evaluation.arms.append(Arm("full", "isolated"))
    full, again = evaluation.measure(EXAMPLES[0]).arms
    assert again.kl < 1e-9
    assert again.agreement == 1
    assert again.answer == full.answer


def test_answers_equal_those_of_generate(engine: Engine) -> None:
    """All arms are decoded together; each must get the answer that it gets alone."""
    evaluation = Evaluation(engine, settings("naive", "legolink:4", "query_aware:0.2", max_tokens=12))
    for example in EXAMPLES:
        composer = evaluation.composer
        parts = [composer.encode_chunk(text) for text in example.documents]
        tail = composer.tail_ids(example.question)
        result = evaluation.measure(example)
        linked = [*evaluation.link(composer, parts, example, "isolated"), tail]
        for arm in result.arms:
            sampling = SamplingParams(max_tokens=12, stop_token_ids=tuple(composer.stop_token_ids))
            alone = engine.generate(linked, sampling, policy=arm.policy)
            assert arm.answer == alone.text.strip()
            assert (arm.rows, arm.recomputed) == (alone.stats.rows, alone.stats.recomputed) or arm.policy == "full"


def test_neighbours_are_sought_in_the_whole_data_set(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = engine.compile_neighbours

    def spy(chunks: Any, neighbours: Any, **options: Any) -> Any:
        seen.extend(zip(chunks, neighbours, strict=True))
        return real(chunks, neighbours, **options)

    monkeypatch.setattr(engine, "compile_neighbours", spy)
    evaluation = Evaluation(engine, settings("naive", contexts=("neighbours:1",)), embedder=BagOfWords())
    lone = [
        EvalExample("a", ("the price of a red tent is nine crowns",), "what?"),
        EvalExample("b", ("the price of a blue tent is two crowns",), "what?"),
        EvalExample("c", ("nobody swims in a quarry at night",), "what?"),
    ]
    evaluation.run(lone)
    ids = [evaluation.composer.encode_chunk(e.documents[0]) for e in lone]
    assert [(tuple(c), [tuple(n) for n in ns]) for c, ns in seen][:2] == [(ids[0], [ids[1]]), (ids[1], [ids[0]])]
    assert tuple(seen[2][0]) == ids[2]
    assert len(seen[2][1]) == 1


def test_figures_against_the_untouched_model(engine: Engine) -> None:
    """Likelihood and greedy answer of ``full`` come out of one plain forward pass, too."""
    evaluation = Evaluation(engine, settings("naive"))
    result = evaluation.measure(EXAMPLES[0])
    composer = evaluation.composer
    parts = [composer.encode_chunk(text) for text in EXAMPLES[0].documents]
    prompt = [t for part in composer.compose(parts, EXAMPLES[0].question) for t in part]
    gold = composer.tokenizer.encode_text("nine crowns")
    with torch.inference_mode():
        logits = model()(torch.tensor([prompt + gold])).logits[0].double()
    logp = torch.log_softmax(logits, -1)
    expected = -np.mean([float(logp[len(prompt) - 1 + i, t]) for i, t in enumerate(gold)])
    assert result.arms[0].nll == pytest.approx(expected, rel=1e-4)
    assert result.arms[0].prompt == len(prompt)


def test_nothing_is_left_in_the_store(engine: Engine) -> None:
    kept = engine.compile([1, 2, 3])
    Evaluation(engine, settings("naive", contexts=("isolated", "neighbours:1")), embedder=BagOfWords()).run(EXAMPLES)
    assert [info.key for info in engine.store.entries()] == [kept]


def test_examples_with_the_same_documents_share_their_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    put = engine.store.put
    monkeypatch.setattr(engine.store, "put", lambda chunks: (stored.append(len(chunks)), put(chunks))[1])
    tenants = [replace(EXAMPLES[0], example_id=f"t{i}", system=f"You are clerk {i}.") for i in range(3)]
    Evaluation(engine, settings("naive", contexts=("head",))).run(tenants)
    # Four documents once, under the default head, and a head of its own for each request.
    assert sum(stored) == len(DOCUMENTS) + 3


def test_a_rerun_resumes_and_a_larger_limit_adds(engine: Engine, calls: Counter[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    first = Evaluation(engine, settings("naive")).run(EXAMPLES[:2], records=path)
    assert calls == {"link": 4}  # two arms
    seen: list[tuple[int, int]] = []
    again = Evaluation(engine, settings("naive")).run(
        EXAMPLES[:3], records=path, progress=lambda *step: seen.append(step)
    )
    assert calls == {"link": 6}
    assert again[:2] == first
    assert seen == [(2, 3), (3, 3)]
    assert len(path.read_text().splitlines()) == 1 + 3
    calls.clear()
    assert Evaluation(engine, settings("naive")).run(EXAMPLES[:3], records=path) == again
    assert not calls


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (settings("naive", "legolink:4"), "policies"),
        (settings("naive", contexts=("head",)), "contexts"),
        (settings("naive", max_tokens=7), "max_tokens was 6 and is 7"),
        (settings("naive", seed=1), "seed"),
        (settings("naive", kv_dtypes=("bf16",)), r"kv_dtypes was \['auto'\] and is \['bf16'\]"),
    ],
)
def test_other_settings_are_refused(engine: Engine, tmp_path: Path, changed: EvalSettings, named: str) -> None:
    path = tmp_path / "records.jsonl"
    Evaluation(engine, settings("naive")).run(EXAMPLES[:1], records=path)
    with engines_of(engine, changed.kv_dtypes) as engines, pytest.raises(RagError, match=named) as caught:
        Evaluation(engine, changed, engines=engines).run(EXAMPLES[:1], records=path)
    assert "delete it" in str(caught.value)
    assert "--json" in str(caught.value)


def test_more_examples_are_other_neighbours(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    chosen = settings("naive", contexts=("neighbours:1",))
    Evaluation(engine, chosen, embedder=BagOfWords()).run(EXAMPLES[:2], records=path)
    with pytest.raises(RagError, match="corpus"):
        Evaluation(engine, chosen, embedder=BagOfWords()).run(EXAMPLES[:3], records=path)
    Evaluation(engine, chosen, embedder=BagOfWords()).run(EXAMPLES[:2], records=path)


def test_ctrl_c_keeps_what_is_done(engine: Engine, calls: Counter[str], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Evaluation(engine, settings("naive")).run(EXAMPLES, records=path, progress=stop)
    assert not list(engine.store.entries())
    assert len(path.read_text().splitlines()) == 1 + 2
    calls.clear()
    assert len(Evaluation(engine, settings("naive")).run(EXAMPLES, records=path)) == 4
    assert calls["link"] == 4


def test_a_torn_line_is_measured_again_and_a_foreign_file_refused(
    engine: Engine, calls: Counter[str], tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    Evaluation(engine, settings("naive")).run(EXAMPLES[:2], records=path)
    whole = path.read_bytes()
    for cut in (5, 1):
        path.write_bytes(whole[:-cut])
        calls.clear()
        Evaluation(engine, settings("naive")).run(EXAMPLES[:2], records=path)
        assert calls["link"] == 2
        assert json.loads(path.read_text().splitlines()[0])["settings"]["dataset"] == "tiny"
    for foreign in (b"hello\nworld\n", b'{"a": 1}\n', whole + b"{}\n"):
        path.write_bytes(foreign)
        with pytest.raises(RagError, match="no record of an evaluation"):
            Evaluation(engine, settings("naive")).run(EXAMPLES[:2], records=path)
        assert path.read_bytes() == foreign


def test_what_does_not_fit_is_skipped_and_said(engine: Engine) -> None:
    long = replace(EXAMPLES[0], example_id="long", documents=("word " * 3000,))
    results = Evaluation(engine, settings("naive")).run([long, EXAMPLES[1]])
    assert "max_model_len is 2048" in results[0].skipped
    summary = summarise(results)
    assert (summary.examples, summary.skipped) == (1, 1)


def test_prefix_runs_once_and_starts_cold(engine: Engine) -> None:
    evaluation = Evaluation(engine, settings("prefix", "naive", contexts=("isolated", "head")))
    assert evaluation.arms == [Arm("full", ""), Arm("prefix", ""), Arm("naive", "isolated"), Arm("naive", "head")]
    result = evaluation.run(EXAMPLES[:1])[0]
    assert result.arms[1].rows == result.arms[1].prompt
    assert result.arms[1].kl < 1e-9


def test_stored_types_are_compared_with_each_other(engine: Engine) -> None:
    """Arms of one policy differ by the rounding of their chunks alone; figures against a calculation by hand."""
    chosen = settings("naive", "legolink:100000", contexts=("isolated", "neighbours:1"), kv_dtypes=("auto", "int8"))
    with engines_of(engine, chosen.kv_dtypes) as engines:
        assert engines["auto"] is engine
        evaluation = Evaluation(engine, chosen, embedder=BagOfWords(), engines=engines)
        results = evaluation.run(EXAMPLES)
        for each in engines.values():
            assert not list(each.store.entries())
        composer = evaluation.composer
        example = EXAMPLES[0]
        parts = [composer.encode_chunk(text) for text in example.documents]
        tail = composer.tail_ids(example.question)
        sampling = SamplingParams(max_tokens=6, stop_token_ids=tuple(composer.stop_token_ids))
        full = engine.generate([composer.head_ids, *parts, tail], sampling, policy="full")
        answer = [*full.token_ids, *([0] if full.finish_reason == "stop" else [])]
        logits = {}
        for name, each in engines.items():
            linked = [*evaluation.link(composer, parts, example, "isolated", name), tail]
            logits[name] = each.score(linked, answer, policy="naive").double()
    with pytest.raises(EngineClosedError):
        engines["int8"].compile([1, 2, 3])
    assert engine.compile([1, 2, 3])
    arms = [(a.policy, a.context, a.kv_dtype) for a in results[0].arms]
    linked_arms = [
        (p, c, k) for c in ("isolated", "neighbours:1") for p in ("naive", "legolink:100000") for k in ("auto", "int8")
    ]
    assert arms == [("full", "", "auto"), *linked_arms]
    for result in results:
        for arm in result.arms:
            if arm.kv_dtype == "auto":
                assert (arm.kv_kl, arm.kv_agreement) == (None, None)
            else:
                assert arm.kv_kl is not None
                assert 0 < arm.kv_kl < 1e-2
                assert arm.kv_agreement == pytest.approx(1, abs=0.2)
            if arm.policy != "naive":
                # The head, which is not computed anew, is all that can be rounded.
                assert arm.kl < (1e-6 if arm.kv_dtype == "auto" else 1e-2)
    logp = {name: torch.log_softmax(found, -1) for name, found in logits.items()}
    by_hand = (logp["auto"].exp() * (logp["auto"] - logp["int8"])).sum(-1)
    found = next(a for a in results[0].arms if (a.policy, a.context, a.kv_dtype) == ("naive", "isolated", "int8"))
    assert found.kv_kl == pytest.approx(float(by_hand.mean()), rel=1e-2)
    agree = (logp["auto"].argmax(-1) == logp["int8"].argmax(-1)).double().mean()
    assert found.kv_agreement == pytest.approx(float(agree))


def test_an_engine_s_own_type_is_the_default() -> None:
    with Engine(model(), tokenizer=tokenizer(), selftest=False, kv_dtype="int8") as rounding:
        evaluation = Evaluation(rounding, settings("naive"))
        assert evaluation.arms == [Arm("full", ""), Arm("naive", "isolated", "int8")]
        arm = evaluation.run(EXAMPLES[:1])[0].arms[1]
        assert (arm.kv_dtype, arm.kv_kl) == ("int8", None)
        with pytest.raises(ConfigError, match="engines_of"):
            Evaluation(rounding, settings("naive", kv_dtypes=("auto",)))


def test_bad_requests_name_the_fix(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="legolink:k"):
        Evaluation(engine, settings("magic"))
    with pytest.raises(ConfigError, match="neighbours:n"):
        Evaluation(engine, settings("naive", contexts=("magic",)))
    with pytest.raises(ConfigError, match="embedder="):
        Evaluation(engine, settings("naive", contexts=("neighbours:1",)))
    with pytest.raises(ConfigError, match="at least one"):
        Evaluation(engine, settings("naive", contexts=()))
    with pytest.raises(RagError, match="more than once"):
        Evaluation(engine, settings("naive")).run([EXAMPLES[0], EXAMPLES[0]])
    with Engine(model(), selftest=False) as bare, pytest.raises(ConfigError, match="tokenizer="):
        Evaluation(bare, settings("naive"))


def _arm(policy: str, score: float | None, answer: str = "x", kl: float = 0.0, ttft: float = 1.0) -> ArmResult:
    return ArmResult(policy, "", answer, score, kl, 1 - kl, kl == 0, 2 + kl, 100, 10 if kl else 100, 0, ttft)


def test_summary_by_hand() -> None:
    results = [
        ExampleResult("a", "a", {"base": "1", "k": "10"}, (_arm("full", 1.0), _arm("naive", 1.0, "x", 0.2, 0.5))),
        ExampleResult("b", "b", {"base": "1", "k": "9"}, (_arm("full", 1.0), _arm("naive", 0.0, "y", 0.4, 0.1))),
        ExampleResult("c", "c", {"base": "2", "k": "9"}, (_arm("full", 0.0), _arm("naive", 1.0, "x", 0.0, 0.2))),
        ExampleResult("d", "d", {"base": "3", "k": "9"}, (_arm("full", None), _arm("naive", None, "x", 0.6, 0.2))),
    ]
    summary = summarise(results)
    full, naive = summary.arms
    assert (full.kept.mean, full.right, full.consistency) == (1, 2, 1)
    assert (naive.kept.mean, naive.right) == (0.5, 2)
    assert naive.kl.mean == pytest.approx(0.3)
    assert naive.score.mean == pytest.approx(2 / 3)  # the one without answers does not count
    assert naive.score_change.mean == pytest.approx(0)
    assert naive.nll_change.mean == pytest.approx(0.3)
    assert naive.rows_share == pytest.approx((0.1 + 0.1 + 1 + 0.1) / 4)
    assert naive.speedup == pytest.approx(5)
    assert naive.consistency == 0.5  # of base 1's two answers, each is given once
    assert list(summary.groups) == ["k"]
    assert list(summary.groups["k"]) == ["9", "10"]
    assert summary.groups["k"]["9"][1].examples == 3
    json.dumps(summary.as_dict(), allow_nan=False)
    assert summarise([]).arms == ()
