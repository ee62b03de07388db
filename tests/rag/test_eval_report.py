"""The page and the command line of an evaluation, on a tiny model."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from epic_rag.errors import MissingDependencyError
from epic_rag.evaluation import plots
from epic_rag.evaluation.records import ArmResult, ExampleResult
from epic_rag.evaluation.report import write_report
from epic_rag.evaluation.summary import summarise
from tests.rag.conftest import Run
from tests.rag.stack import TEXTS

PNG = b"\x89PNG\r\n\x1a\n"
ARMS = [("full", ""), ("naive", "isolated"), ("naive", "head"), ("legolink:16", "isolated"), ("legolink:16", "head")]


def _results(group: Callable[[int], dict[str, str]], count: int = 6) -> list[ExampleResult]:
    return [
        ExampleResult(
            f"e{i}",
            f"d{i}",
            group(i),
            tuple(
                ArmResult(p, c, f"<b>&{i}{n}", float((i + n) % 3 > 0), 0.1 * n, 1 - 0.1 * n, not n, 2.0, 100, 100, 0, 1)
                for n, (p, c) in enumerate(ARMS)
            ),
        )
        for i in range(count)
    ]


def _write(path: Path, results: list[ExampleResult]) -> list[Path]:
    machine = {"cpu": "one & two", "threads": 1}
    return write_report(path, summarise(results), results, title="<t>", command="epic-rag eval x", machine=machine)


def test_the_page_is_well_formed_self_contained_and_complete(tmp_path: Path) -> None:
    results = _results(lambda i: {"depth": str(i % 3 / 2), "length": str(500 * (1 + i % 2))})
    written = _write(tmp_path / "a" / "page.html", results)
    assert [p.name for p in written] == ["page.html", "page.quality.png", "page.needle.png"]
    assert all(p.read_bytes().startswith(PNG) for p in written[1:])
    text = written[0].read_text(encoding="utf-8")
    page = ET.fromstring(text.partition("\n")[2])
    sources = [v for e in page.iter() for k, v in e.attrib.items() if k in ("src", "srcset", "href")]
    assert len(sources) == 4  # two pictures, light and dark
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(PNG)
    assert not re.search(r"https?://|@import|<script|url\(", text)
    words = " ".join(" ".join(page.itertext()).split())
    for policy, context in ARMS:
        assert f"{policy} · {context}" if context else policy in words
    assert "epic-rag eval x" in words
    assert "cpu: one & two" in words
    assert "By depth" in words
    assert "By length" in words
    assert "<b>&00" in words  # escaped, so the parser gives it back


def test_stored_types_are_arms_of_their_own(tmp_path: Path) -> None:
    """Their names stand in tables, answers and pictures, and what rounding changed with two digits of a percent."""
    results = [
        ExampleResult(
            f"e{i}",
            f"d{i}",
            {},
            (
                ArmResult("full", "", "yes", 1, 0, 1, True, 2, 100, 100, 0, 1),
                ArmResult("naive", "head", "yes", 1, 0.1, 0.9, True, 2, 100, 100, 0, 1),
                ArmResult("naive", "head", f"no {i}", 0, 0.1, 0.9, True, 2, 100, 100, 0, 1, "int8", 2e-5, 0.9966),
            ),
        )
        for i in range(3)
    ]
    plain = _write(tmp_path / "plain.html", [ExampleResult(r.example_id, r.digest, {}, r.arms[:2]) for r in results])
    written = _write(tmp_path / "page.html", results)
    assert written[1].read_bytes() != plain[1].read_bytes()
    page = ET.fromstring(written[0].read_text(encoding="utf-8").partition("\n")[2])
    rows = [[" ".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    begin = rows.index(["policy · context · stored", "KL", "top-1"])
    label, kl, agreement = rows[begin + 1]
    assert label == "naive · head · int8"
    assert kl.startswith("0.00002")
    assert agreement.startswith("99.66%")
    assert len(rows[begin + 2]) > 3 or rows[begin + 2][0].startswith("example")  # no other arm was rounded
    assert ["", "naive · head · int8", "no 1"] in rows
    assert "Stored KV" not in plain[0].read_text(encoding="utf-8")


def test_without_a_grid_or_answers_there_is_no_needle_map(tmp_path: Path) -> None:
    assert len(_write(tmp_path / "p.html", _results(lambda i: {}))) == 2
    # A single example and arms without any score still make a page.
    bare = [ExampleResult("e", "d", {}, (ArmResult("full", "", "", None, 0, 1, True, None, 10, 10, 0, 1.0),))]
    (page, _) = _write(tmp_path / "q.html", bare)
    ET.fromstring(page.read_text().partition("\n")[2])


def test_pareto_front() -> None:
    points = [(1.0, 0.0), (0.1, 0.3), (0.1, 0.2), (0.5, 0.25), (0.05, 0.9), (0.2, float("nan"))]
    expected = [
        i
        for i, (x, y) in enumerate(points)
        if y == y and not any((a <= x and b <= y) and (a, b) != (x, y) for a, b in points)
    ]
    assert sorted(plots.pareto_front(points)) == expected == [0, 2, 4]


def test_matplotlib_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"epic-rag\[eval\]"):
        plots.require_matplotlib()


@pytest.fixture
def evaluate(run: Run) -> Run:
    return lambda *arguments: run("eval", *arguments)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    documents = [{"id": name, "text": text} for name, text in TEXTS.items()]
    lines = [
        {"id": f"q{i}", "documents": documents, "question": f"Question {i}?", "answers": ["noon"]} for i in range(3)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_command_end_to_end(evaluate: Run, dataset: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out" / "eval.json", tmp_path / "out" / "eval.html"
    arguments = (
        *(str(dataset), "--policies", "naive,legolink:100000", "--contexts", "isolated,head", "--limit", "2"),
        *("--max-tokens", "4", "--dtype", "float32", "--json", str(out), "--html", str(page)),
    )
    code, printed, _ = evaluate(*arguments)
    assert code == 0
    assert "2 examples" in printed
    assert "legolink:100000" in printed
    result = json.loads(out.read_text())
    arms = {(a["policy"], a["context"]): a for a in result["arms"]}
    assert list(arms) == [("full", "")] + [(p, c) for c in ("isolated", "head") for p in ("naive", "legolink:100000")]
    assert arms["full", ""]["kl"] == {"mean": 0, "low": 0, "high": 0}
    assert arms["legolink:100000", "head"]["kl"]["mean"] < 1e-6 < arms["naive", "head"]["kl"]["mean"]
    assert arms["naive", "head"]["rows_share"] < 0.3
    assert {"command", "machine", "model", "settings", "groups", "records"} <= result.keys()
    assert [r["example_id"] for r in result["records"]] == ["q0", "q1"]
    records = out.with_name("eval.json.records.jsonl").read_text().splitlines()
    assert len(records) == 1 + 2
    assert page.is_file()

    again = json.loads(out.read_text())["records"]
    assert evaluate(*arguments)[0] == 0  # resumed: the very same times
    assert json.loads(out.read_text())["records"] == again
    code, _, error = evaluate(*arguments, "--seed", "3")
    assert code == 1
    assert "seed was 0 and is 3" in " ".join(error.split())


def test_stored_types_on_the_command_line(evaluate: Run, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    arguments = (str(dataset), "--policies", "naive", "--contexts", "head", "--limit", "2", "--max-tokens", "4")
    code, printed, _ = evaluate(
        *arguments, "--dtype", "float32", "--json", str(out), "--kv-dtypes", "auto,int8,fp8,bf16,int8"
    )
    assert code == 0
    assert "narrower type" in printed
    assert all(printed.count(f"head · {name}") == 2 for name in ("int8", "fp8", "bf16"))
    result = json.loads(out.read_text())
    arms = {(a["policy"], a["kv_dtype"]): a for a in result["arms"]}
    assert list(arms) == [("full", "auto"), *(("naive", k) for k in ("auto", "int8", "fp8", "bf16"))]
    assert arms["naive", "auto"]["kv_kl"]["mean"] is None
    # The narrower, the further away.
    assert 0 < arms["naive", "int8"]["kv_kl"]["mean"] < arms["naive", "fp8"]["kv_kl"]["mean"] < 0.5
    assert 0 < arms["naive", "bf16"]["kv_kl"]["mean"] < arms["naive", "fp8"]["kv_kl"]["mean"]
    assert result["settings"]["kv_dtypes"] == ["auto", "int8", "fp8", "bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("templated", "--kv-dtypes", "int4"), "auto, bf16, int8, fp8"),
        (("templated", "--kv-dtypes", " , "), "nothing to compare"),
        (("no-such-set",), "templated"),
        (("templated", "--policies", "magic"), "legolink:k"),
        (("templated", "--contexts", "magic"), "neighbours:n"),
    ],
)
def test_errors_come_before_the_model(evaluate: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, error = evaluate(*arguments, "--model", "/no/such/model")
    assert code == 1
    assert message in " ".join((out + error).split())
    assert "Traceback" not in error


def test_help_of_eval_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from epic_rag import cli\n"
        "sys.argv = ['epic-rag', 'eval', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "legolink:16" in done.stdout
