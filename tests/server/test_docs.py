"""docs/server.md: its commands and programs run against a gateway, its tables say what the code says."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epic_rag.server import errors
from epic_rag.server.command import serve_command
from epic_rag.server.keys import KeyRing
from epic_rag.server.schemas.answers import EpicAnswer
from epic_rag.server.schemas.chat import EpicOptions
from epic_rag.server.settings import ServerSettings, load_settings
from tests.server.running import Running, running

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
NEXT = "==== next block ===="


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that calls its model as the documentation does."""
    with running(tmp_path_factory.mktemp("gateway"), model_name="smollm2") as here:
        yield here


def test_its_commands_run(gateway: Running, tmp_path: Path) -> None:
    for tool in ("bash", "curl", "jq"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    commands = blocks("sh")
    script = 'curl() { command curl --silent --show-error --fail-with-body --max-time 60 "$@"; }\n'
    script += f"\necho; echo '{NEXT}'\n".join(commands).replace(ADDRESS, gateway.base_url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    said = done.stdout.split(NEXT)
    assert done.returncode == 0, (done.stderr, said[-1])
    assert len(said) == len(commands)
    for command, output in zip(commands, said, strict=True):
        assert '"error"' not in output, (command, output)
        assert "{" in output, (command, output)
    by_reference, by_parts = (
        json.loads(output)["epic"]["chunks"]
        for command, output in zip(commands, said, strict=True)
        if "'$id'" in command
    )
    assert len(by_reference) == len(by_parts) == 1
    tokenized = next(output for command, output in zip(commands, said, strict=True) if "/tokenize" in command)
    assert json.loads(tokenized)["chunks"][0]["id"] == by_parts[0]["id"]
    progress = [output for command, output in zip(commands, said, strict=True) if '"chunks": [' in command]
    assert "epic.progress" in progress[0]
    retrieved = next(output for command, output in zip(commands, said, strict=True) if '"retrieve"' in command)
    assert {source["doc_id"] for source in json.loads(retrieved)["epic"]["sources"]} == {"rentals", "shop/cat"}


def test_its_programs_run(gateway: Running, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for program in blocks("python"):
        assert "print(" in program
        exec(compile(program.replace(ADDRESS, gateway.base_url), "docs/server.md", "exec", dont_inherit=True), names)
        assert capsys.readouterr().out.strip()


def test_its_files_are_taken(tmp_path: Path) -> None:
    keys, config = blocks("toml")
    path = tmp_path / "keys.toml"
    path.write_text(keys)
    path.chmod(0o600)
    ring = KeyRing.open(path, "default")
    found = ring.find("Bearer a-long-random-string-of-yours")
    assert found is not None
    assert found.namespace == "shop"
    file = tmp_path / "config.toml"
    file.write_text(config)
    assert load_settings({}, file).max_concurrent == 64


def settings_table() -> str:
    """What the table of settings must be."""
    flags = inspect.signature(serve_command).parameters
    lines = ["| setting | flag | default | |", "|---|---|---|---|"]
    for name, field in ServerSettings.model_fields.items():
        flag = f"`--{name.replace('_', '-')}`" if name in flags else ""
        default = field.default
        if field.is_required():
            shown = "*must be given*"
        elif default in (None, "", ()):
            shown = ""
        elif isinstance(default, bool):
            shown = str(default).lower()
        else:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
        lines.append(f"| `{name}` | {flag} | {shown} | {field.description} |")
    return "\n".join(lines)


def test_its_settings_are_those_of_the_code() -> None:
    assert settings_table() in PAGE


def test_every_error_code_is_explained() -> None:
    sources = Path(errors.__file__).parent.rglob("*.py")
    codes = {code for source in sources for code in re.findall(r'\bcode="(\w+)"', source.read_text(encoding="utf-8"))}
    explained = set(re.findall(r"`(\w+)`", PAGE.partition("\n## Errors")[2].partition("\n## ")[0]))
    assert codes - explained == {"cancelled"}  # nobody is left to read it


def test_all_that_is_said_of_an_answer_is_explained() -> None:
    served = PAGE.partition("\n## What is served")[2].partition("\n## ")[0]
    for name in (*EpicOptions.model_fields, *EpicAnswer.model_fields):
        assert f"`{name}`" in served, name


def test_its_example_adds_up() -> None:
    (example,) = map(json.loads, blocks("json"))
    assert set(example) == set(EpicAnswer.model_fields)
    assert example["linked_tokens"] == sum(chunk["tokens"] for chunk in example["chunks"])
    assert example["linked_tokens"] == example["recomputed_tokens"] + example["reused_tokens"]
    assert example["reused_tokens"] == sum(stop - start for start, stop in example["reused_spans"])


def test_its_images_and_links_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert "://" in target or (DOCS / target).is_file(), target
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", PAGE, re.M)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchor in anchors, anchor
