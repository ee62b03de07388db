"""Data sets: every format's reader on small literal samples, and what generated sets promise."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from epic_engine.errors import ConfigError

from epic_rag.errors import DocumentError
from epic_rag.evaluation.datasets import GENERATED, load
from epic_rag.evaluation.example import EvalExample
from epic_rag.evaluation.facts import FORMS
from epic_rag.evaluation.generated import NEEDLE_DEPTHS
from epic_rag.evaluation.metrics import contains
from epic_rag.evaluation.readers import read_file

GENERIC = {"id": "g1", "documents": [{"id": "a", "text": "One."}, "Two."], "question": "Q?", "answers": ["One"]}
LONGBENCH = {
    "input": "Who wrote it?",
    "context": "Passage 1:\nFirst book\nBy Ann.\n\nStill one.\n\n\nPassage 2:\nSecond book\nBy Bob.",
    "answers": ["Ann", "Ann B."],
    "length": 20,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "lb1",
}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Rome", "paragraph_text": "A city.", "is_supporting": True},
        {"idx": 1, "title": "Po", "paragraph_text": "A river.", "is_supporting": False},
    ],
    "question": "What is Rome?",
    "answer": "a city",
    "answer_aliases": ["city", "a city"],
    "answerable": True,
}
TWO_WIKI = {
    "_id": "w1",
    "type": "bridge",
    "context": [["Rome", ["A city.", " It is old."]], ["Po", ["A river."]]],
    "supporting_facts": [["Rome", 0]],
    "question": "What is Rome?",
    "answer": "city",
}


def _write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def _only(path: Path, record: object) -> EvalExample:
    (found,) = load(_write(path / "data.jsonl", record))
    return found


def test_generic_form(tmp_path: Path) -> None:
    found = _only(tmp_path, GENERIC)
    assert (found.example_id, found.documents, found.answers) == ("g1", ("One.", "Two."), ("One",))
    assert (found.scorer, found.system) == ("f1", None)


def test_generic_form_with_a_scorer_and_without_documents(tmp_path: Path) -> None:
    assert _only(tmp_path, {**GENERIC, "scorer": "contains"}).scorer == "contains"
    with pytest.raises(DocumentError, match="rougeL"):
        _only(tmp_path, {**GENERIC, "scorer": "magic"})
    alone = _write(tmp_path / "q.jsonl", {"question": "Who?", "answers": "Ines"})
    (found,) = read_file(alone, count_tokens=len, questions_alone=True)
    assert (found.question, found.answers, found.documents) == ("Who?", ("Ines",), ())
    with pytest.raises(DocumentError, match="no documents"):
        load(alone)


def test_longbench_passages(tmp_path: Path) -> None:
    found = _only(tmp_path, LONGBENCH)
    assert found.documents == (
        "Passage 1:\nFirst book\nBy Ann.\n\nStill one.",
        "Passage 2:\nSecond book\nBy Bob.",
    )
    assert (found.example_id, found.question, found.answers) == ("lb1", "Who wrote it?", ("Ann", "Ann B."))
    assert found.group == {"dataset": "hotpotqa"}
    assert found.scorer == "f1"


def test_longbench_without_passages_is_packed(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph number {i} " + "word " * 150 for i in range(9)]
    record = {**LONGBENCH, "context": "\n\n".join(paragraphs), "input": "", "dataset": "gov_report"}
    (found,) = load(_write(tmp_path / "d.jsonl", record), count_tokens=lambda text: len(text.split()))
    assert [len(d.split()) for d in found.documents] == [459, 459, 459]
    assert " ".join(" ".join(found.documents).split()) == " ".join(" ".join(paragraphs).split())
    assert found.scorer == "rougeL"
    assert "summary" in found.question


def test_longbench_sets_with_other_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="hotpotqa"):
        _only(tmp_path, {**LONGBENCH, "dataset": "lcc"})


def test_musique(tmp_path: Path) -> None:
    found = _only(tmp_path, MUSIQUE)
    assert found.documents == ("Rome\nA city.", "Po\nA river.")
    assert found.answers == ("a city", "city")
    assert found.group == {"hops": "2"}


def test_two_wiki_as_lines_and_as_one_array(tmp_path: Path) -> None:
    found = _only(tmp_path, TWO_WIKI)
    assert found.documents == ("Rome\nA city. It is old.", "Po\nA river.")
    assert (found.example_id, found.answers, found.group) == ("w1", ("city",), {"type": "bridge"})
    array = tmp_path / "dev.json"
    array.write_text(json.dumps([TWO_WIKI, {**TWO_WIKI, "_id": "w2"}]))
    assert [e.example_id for e in load(array)] == ["w1", "w2"]
    assert [e.example_id for e in load(array, limit=1)] == ["w1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "no question"}\n', "none of the known formats"),
        ("not json\n", "neither JSON lines"),
        ("", "no examples"),
        (json.dumps(GENERIC) + "\n" + json.dumps({"id": 1, "documents": []}), "line 2"),
        (json.dumps({**GENERIC, "documents": []}), "no documents"),
        (json.dumps({**MUSIQUE, "paragraphs": [{"title": "x"}]}), "paragraph_text"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DocumentError, match=message):
        load(path)


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"templated.*tenants"):
        load("no-such-set")
    with pytest.raises(DocumentError, match=r"generic.*musique"):
        load(_write(tmp_path / "d.jsonl", GENERIC), format="xml")
    with pytest.raises(DocumentError, match="1 or more"):
        load("needle", limit=0)
    for wrong in ("templated:5", "needle:x", "needle:0"):
        with pytest.raises(ConfigError, match="needle:500,4000"):
            load(wrong)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_sets_are_seeded_and_grow_at_the_end(name: str) -> None:
    first = load(name, limit=12, seed=3)
    assert [e.digest for e in first] == [e.digest for e in load(name, limit=14, seed=3)[:12]]
    assert len({e.digest for e in first}) == 12
    assert {e.digest for e in first}.isdisjoint(e.digest for e in load(name, limit=12, seed=4))


def _places(text: str, word: str) -> list[int]:
    return [m.start() for m in re.finditer(rf"\b{re.escape(word)}\b", text)]


@pytest.mark.parametrize("name", ["needle", "templated", "order", "tenants"])
def test_the_answer_stands_once_in_the_right_document(name: str) -> None:
    for example in load(name, limit=24, seed=1):
        (answer,) = example.answers
        holders = [i for i, text in enumerate(example.documents, start=1) if contains(text, answer)]
        assert holders == [int(example.group["place"])], example.example_id
        assert len(_places(example.documents[holders[0] - 1], answer)) == 1
        assert not contains(example.question, answer)


def test_templated_chunks_share_a_form_with_different_values() -> None:
    forms = Counter()
    for example in load("templated", limit=24, seed=2):
        form = next(f for f in FORMS if f.name == example.group["form"])
        pattern = re.escape(form.sentence).replace(r"\{place\}", r"\w+").replace(r"\{value\}", r"([\w:]+)")
        found = [re.findall(pattern, text) for text in example.documents]
        assert [len(values) for values in found] == [1] * len(found)
        assert len({values[0] for values in found}) == len(found)
        assert len(example.documents) == int(example.group["chunks"])
        assert 5 <= len(example.documents) <= 8
        assert all(60 <= len(text) / 4 <= 190 for text in (*example.documents, *example.others))
        # The store holds as many again that say the same of other places.
        more = [re.findall(pattern, text) for text in example.others]
        assert [len(values) for values in more] == [1] * len(example.documents)
        assert not {v for values in more for v in values} & {v for values in found for v in values}
        forms[form.name] += 1
    assert set(forms) == {f.name for f in FORMS}


def test_templated_asks_three_questions_about_the_same_records() -> None:
    by_records: dict[str, list[EvalExample]] = {}
    for example in load("templated", limit=30, seed=5):
        by_records.setdefault(example.group["records"], []).append(example)
    assert len(by_records) == 10
    for asked in by_records.values():
        assert len(asked) == 3
        assert len({tuple(sorted(e.documents)) for e in asked}) == len({e.corpus for e in asked}) == 1
        assert (
            len({e.documents for e in asked})
            == len({e.question for e in asked})
            == len({e.answers for e in asked})
            == 3
        )


def test_needle_covers_the_grid_at_the_lengths_asked_for() -> None:
    count = lambda text: len(text.split())  # noqa: E731
    examples = load("needle:300,900", limit=20, count_tokens=count)
    cells = Counter((e.group["length"], e.group["depth"]) for e in examples)
    assert cells == Counter({(n, f"{d:g}"): 2 for n in ("300", "900") for d in NEEDLE_DEPTHS})
    for example in examples:
        assert sum(map(count, example.documents)) == pytest.approx(int(example.group["length"]), rel=0.15)
        assert len(example.documents) >= int(example.group["length"]) // 400
        text = " ".join(example.documents)
        depth = _places(text, example.answers[0])[0] / len(text)
        assert depth == pytest.approx(float(example.group["depth"]), abs=0.15)


def test_order_permutes_and_tenants_change_the_system_prompt_alone() -> None:
    by_base: dict[str, list[EvalExample]] = {}
    for example in load("order", limit=8):
        by_base.setdefault(example.group["base"], []).append(example)
    for variants in by_base.values():
        assert len({tuple(sorted(v.documents)) for v in variants}) == 1
        assert len({v.documents for v in variants}) == len(variants) == 4
        assert len({(v.question, v.answers) for v in variants}) == 1
    tenants = load("tenants", limit=4)
    assert len({(t.documents, t.question, t.answers) for t in tenants}) == 1
    assert len({t.system for t in tenants}) == 4


def test_fewshot_never_shows_the_asked_pair() -> None:
    for example in load("fewshot", limit=24):
        assert all(f"Question: {example.question}" not in text.splitlines() for text in example.documents)
        assert all(text.count("Question: ") == text.count("Answer: ") >= 4 for text in example.documents)
        assert len(example.documents) >= 4
