"""Nothing that is read is run: no pickle, no code of models, no values in SQL; read off the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "code", "codeop"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "yaml.load",
    "numpy.load",
    "np.load",
    "faiss.read_index",
}


def _sources() -> list[Path]:
    folders = ("engine/epic_engine", "epic_rag", "integrations/langchain_epic", "integrations/llama_index_epic")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def offences(tree: ast.Module) -> list[str]:
    """What a module does that could run what it reads."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in FORBIDDEN:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name in ATTRIBUTES or name.endswith((".load_local", ".from_pickle")):
                found.append(name)
            for word in node.keywords:
                allowed = isinstance(word.value, ast.Constant) and word.value.value is False
                if word.arg in ("trust_remote_code", "allow_pickle", "allow_dangerous_deserialization") and not allowed:
                    found.append(f"{word.arg} in {name}")
    return found


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in _sources()}


def test_nothing_that_is_read_is_run() -> None:
    assert len(_trees()) > 100
    assert {str(path): bad for path, tree in _trees().items() if (bad := offences(tree))} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')",
     "f(trust_remote_code=True)", "f(trust_remote_code=x)", "np.load(p, allow_pickle=True)"],
)  # fmt: skip
def test_such_code_would_be_found(source: str) -> None:
    assert offences(ast.parse(source))


def test_models_are_never_loaded_with_code_of_theirs() -> None:
    """Every load says so: by default transformers asks on a terminal."""
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                words = {word.arg: word.value for word in node.keywords}
                spread = None in words  # **local, which has it
                assert spread or ast.unparse(words["trust_remote_code"]) == "False", f"{path}:{node.lineno}"


# What stands in statements, and was looked at: names of tables and columns, question marks, and conditions that the
# module puts together from constants.
_IN_STATEMENTS = {
    ("catalogue.py", "'quick_check' if quick else 'integrity_check'"),
    ("catalogue.py", "condition"),
    ("catalogue.py", "marks"),
    ("catalogue.py", "where"),
    ("indices.py", "content"),
    ("indices.py", "heads"),
    ("indices.py", "key"),
    ("indices.py", "namespace"),
    ("indices.py", "strays"),
    ("registry.py", "marks"),
    ("registry.py", "value"),
    ("schema.py", "', '.join('?' * 22)"),
    ("schema.py", "table"),
    ("segment_table.py", "condition"),
    ("segment_table.py", "table"),
    ("snapshots.py", "condition"),
    ("snapshots.py", "table"),
    ("tombstones.py", "marks"),
}


def _statements(tree: ast.Module) -> Iterator[str]:
    """What is put into texts that begin as SQL does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)).split()
            if words and words[0] in ("SELECT", "INSERT", "UPDATE", "DELETE", "PRAGMA", "CREATE", "DROP", "ALTER"):
                yield from (ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue))


def _constant(name: str) -> bool:
    return name.rpartition(".")[2].isupper()


def test_values_never_stand_in_sql() -> None:
    found = {(path.name, name) for path, tree in _trees().items() for name in _statements(tree) if not _constant(name)}
    assert found - _IN_STATEMENTS == set()
