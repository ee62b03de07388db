"""The command line on a tiny saved model: what it prints, its exit codes, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from epic_rag.defaults import BUILT_IN
from tests.damage import damage, where
from tests.rag.conftest import Run


@pytest.fixture
def store(run: Run, tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "ferry.md").write_text("# Ferry\n\nThe ferry leaves at noon and at dusk. It carries forty people.\n")
    (docs / "crane.txt").write_text("The crane lifts four tonnes. The harbour master is Ines.\n")
    code, out, _ = run("ingest", str(docs), "--store", str(tmp_path / "store"))
    assert code == 0
    assert "2 added" in out
    return tmp_path / "store"


def test_ask_json_has_the_promised_fields(run: Run, store: Path) -> None:
    code, out, _ = run("ask", "When does the ferry leave?", "--store", str(store), "--max-tokens", "5", "--json")
    assert code == 0
    result = json.loads(out)
    assert {"text", "sources", "policy", "reuse", "tokens", "ttft_s"} <= result.keys()
    tokens = result["tokens"]
    assert tokens["reused"] == tokens["linked"] - tokens["recomputed"] > 0
    assert tokens["prompt"] > tokens["linked"]
    assert 1 <= tokens["generated"] <= 5
    assert result["policy"] == BUILT_IN.policy
    assert result["reuse"] == "composed"
    assert result["ttft_s"] > 0
    assert result["sources"][0]["doc_id"].endswith("ferry.md")


def test_ask_prints_answer_sources_and_cost(run: Run, store: Path) -> None:
    code, out, _ = run(
        "ask", "When does the ferry leave?", "--store", str(store), "--max-tokens", "4", "--policy", "naive"
    )
    assert code == 0
    assert "ferry.md" in out.replace("\n", "")
    assert "naive" in out


def test_store_commands(run: Run, store: Path) -> None:
    code, out, _ = run("store", "ls", "--store", str(store), "--json")
    documents = json.loads(out)
    assert code == 0
    assert sorted(Path(d["doc_id"]).name for d in documents) == ["crane.txt", "ferry.md"]

    stats = json.loads(run("store", "stats", "--store", str(store), "--json")[1])
    assert stats["documents"] == 2
    assert stats["kv_bytes"] > 0

    assert run("store", "verify", "--store", str(store))[0] == 0
    victim = next(iter(where(store / "chunks")))
    damage(store / "chunks", victim)
    code, out, _ = run("store", "verify", "--store", str(store), "--json")
    assert code == 1
    assert json.loads(out)["corrupt"] == [victim]
    assert run("store", "verify", "--store", str(store), "--repair")[0] == 0
    assert run("store", "verify", "--store", str(store))[0] == 0

    assert run("store", "rm", documents[0]["doc_id"], "--store", str(store))[0] == 0
    assert len(json.loads(run("store", "ls", "--store", str(store), "--json")[1])) == 1


def test_ingest_again_costs_nothing(run: Run, store: Path) -> None:
    code, out, _ = run("ingest", str(store.parent / "docs"), "--store", str(store), "--json")
    report = json.loads(out)
    assert code == 0
    assert len(report["unchanged"]) == 2
    assert report["compiled_chunks"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ask", "Why?", "--store", "{tmp}/nowhere"), 2, "ingest PATH"),
        (("ingest", "{tmp}/absent.txt", "--store", "{tmp}/s"), 1, "absent.txt"),
        (("ask", "Why?", "--store", "{store}", "--policy", "magic"), 1, "legolink:k"),
        (("ask", "Why?", "--store", "{store}", "--model", "{tmp}/no/model"), 1, "does not exist"),
        (("store", "verify", "--store", "{tmp}/nowhere"), 2, "no store"),
        (("store", "rm", "ferry", "--store", "{store}"), 1, "list the ids"),
        (("bench", "ttft", "--dataset", "{tmp}/none.jsonl"), 1, "none.jsonl"),
    ],
)
def test_errors_name_the_fix(
    run: Run, store: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    filled = [a.format(tmp=tmp_path, store=store) for a in arguments]
    got, out, error = run(*filled)
    assert got == code
    assert message in "".join((out + error).replace("│", "").split("\n")).replace("  ", " ") or message in out + error
    assert "Traceback" not in error


def test_bench_ingest_compares_contexts(run: Run, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "ingest.json"
    texts = [f"The price for lot {n} is {3 * n} crowns. " + "It rains. " * n for n in range(1, 7)]
    data.write_text(json.dumps({"id": "q", "documents": texts, "question": "?"}))
    code, printed, error = run(
        "bench", "ingest", "--dataset", str(data), "--contexts", "head,neighbours:1", "--json", str(out)
    )
    assert (code, error) == (0, error)
    assert "neighbours:1" in printed
    result = json.loads(out.read_text())
    assert result["chunks"] == 6
    table = result["contexts"]
    assert list(table) == ["isolated", "head", "neighbours:1"]
    assert [table[c]["bytes_ratio"] for c in table] == [1, 1, 2]
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in table.values())
    assert [c for c in table if "second_pass" in table[c]] == ["neighbours:1"]


def test_doctor_reports_the_gate(run: Run) -> None:
    code, out, _ = run("doctor", "--json", "--dtype", "float32")
    facts = json.loads(out)
    assert code == 0
    assert facts["passed"]
    assert 0 < facts["error_linked"] <= facts["tolerance"]


def test_bench_ttft_writes_what_it_measured(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = [
        {"id": f"q{i}", "documents": [{"id": str(j), "text": f"Fact {i}{j}. " * 20} for j in range(3)], "question": "?"}
        for i in range(3)
    ]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out" / "ttft.json"
    code, printed, _ = run(
        "bench",
        "ttft",
        "--dataset",
        str(data),
        "--limit",
        "3",
        "--policies",
        "full,prefix,naive,legolink:4",
        "--json",
        str(out),
    )
    assert code == 0
    assert "legolink:4" in printed
    result = json.loads(out.read_text())
    table = result["policies"]
    assert list(table) == ["huggingface", "full", "prefix", "naive", "legolink:4"]
    assert table["full"]["rows"] == table["huggingface"]["rows"] > table["legolink:4"]["rows"] > table["naive"]["rows"]
    assert table["legolink:4"]["rows"] == table["naive"]["rows"] + 3 * 4
    assert {"median_s", "p95_s", "speedup_vs_full", "speedup_vs_prefix", "floor_rows_s", "floor_s"} <= table[
        "naive"
    ].keys()
    counted = [r for r in result["records"] if r["policy"] == "naive"]
    assert [r["example"] for r in counted] == ["q0", "q1", "q2"]  # the warm-up is not counted
    assert result["compile"]["ratio"] > 0


def test_bench_scaling_counts_rows_and_memory(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    code, _, _ = run(
        "bench", "scaling", "--chunks", "2,4", "--chunk-tokens", "40", "--repeats", "1", "--json", str(out)
    )
    assert code == 0
    points = {(p["policy"], p["chunks"]): p for p in json.loads(out.read_text())["points"]}
    assert points["naive", 2]["rows"] == points["naive", 4]["rows"] == 24
    # The first chunk stands where it was compiled, so it is exact and not recomputed.
    assert points["legolink:16", 4]["rows"] == 24 + 3 * 16
    assert points["legolink:16", 4]["peak_bytes"] > points["naive", 4]["peak_bytes"] > 0


def test_help_needs_no_torch() -> None:
    code = "import sys, epic_rag.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chat_converses_and_ends_on_an_empty_line(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["When does the ferry leave?", "And who is the harbour master?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(said))
    code, out, _ = run("chat", "--store", str(store), "--max-tokens", "3", "--policy", "legolink:2")
    assert code == 0
    prompts = [int(line.split("prompt tokens")[0].split()[-1]) for line in out.splitlines() if "prompt tokens" in line]
    assert len(prompts) == 2
    assert prompts[1] > prompts[0]  # the second prompt holds the first turn
    assert next(said, "nothing left") == "nothing left"


def test_demo_times_three_ways(run: Run, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "ferry.md").write_text("# Ferry\n\nThe ferry leaves at noon. It carries forty people.\n")
    questions = [{"question": "When does the ferry leave?", "answers": ["noon"], "source": "ferry.md"}]
    (corpus / "questions.json").write_text(json.dumps(questions))
    code, out, _ = run("demo", "--corpus", str(corpus), "--store", str(tmp_path / "demo"), "--k", "3")
    assert code == 0
    for heading in ("reused", "recomputed", "linked", "prefix cache", "full prefill", "median"):
        assert heading in out
    assert "When does the ferry leave?" in out
    assert "slower" in out
    code, _, error = run("demo", "--corpus", str(tmp_path / "absent"), "--store", str(tmp_path / "demo"))
    assert code == 1
    assert "--corpus" in error
