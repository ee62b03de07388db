"""Where settings come from: flags before the environment before the file before defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError

from epic_rag.server.settings import ENVIRONMENT, ServerSettings, load_settings

# Of every setting: as the file, the environment and a flag give it, each another value, and what it is then.
VALUES: dict[str, tuple[Any, str, Any]] = {
    "store": ("a", "b", Path("c")),
    "model": ("a", "b", "c"),
    "model_name": ("a", "b", "c"),
    "host": ("a", "b", "c"),
    "port": (1, "2", 3),
    "api_key_file": ("a", "b", Path("c")),
    "namespace": ("a", "b", "c"),
    "policy": ("a", "b", "c"),
    "context": ("a", "b", "c"),
    "device": ("a", "b", "c"),
    "dtype": ("a", "b", "c"),
    "kv_dtype": ("a", "b", "c"),
    "memory": ("1GiB", "2GiB", "3GiB"),
    "max_model_len": (100, "200", 300),
    "max_tokens": (1, "2", 3),
    "max_answers": (1, "2", 3),
    "max_body_bytes": (1, "2", 3),
    "max_concurrent": (1, "2", 3),
    "request_seconds": (1.5, "2.5", 3.5),
    "body_seconds": (1.5, "2.5", 3.5),
    "write_seconds": (1.5, "2.5", 3.5),
    "drain_seconds": (1.5, "2.5", 3.5),
    "requests_per_minute": (1, "2", 3),
    "tokens_per_minute": (1, "2", 3),
    "sweep_seconds": (1.5, "2.5", 3.5),
    "console": (False, "false", True),
    "log_level": ("debug", "warning", "error"),
    "log_texts": (True, "true", False),
    "allow_origins": (["http://a"], "http://b", ("http://c", "http://d")),
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(ENVIRONMENT) or name == "EPIC_RAG_MODEL":
            monkeypatch.delenv(name)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | list) else f'"{value}"'


def plain(value: Any) -> Any:
    """A setting as the environment would spell it."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_table_knows_every_setting() -> None:
    assert set(VALUES) == set(ServerSettings.model_fields)


@pytest.mark.parametrize("name", VALUES)
def test_flags_go_before_the_environment_and_that_before_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_file, in_environment, as_flag = VALUES[name]
    others: dict[str, Any] = {} if name == "store" else {"store": Path("s")}
    if name != "store":
        default = getattr(load_settings(others), name)
        assert plain(in_file) != plain(default) or name in ("console", "log_texts")
    file = tmp_path / "gateway.toml"
    file.write_text(f"{name} = {toml(in_file)}\n", encoding="utf-8")
    assert plain(getattr(load_settings(others, file), name)) == plain(in_file)
    monkeypatch.setenv(f"{ENVIRONMENT}{name.upper()}", in_environment)
    assert plain(getattr(load_settings(others, file), name)) == in_environment
    assert plain(getattr(load_settings({**others, name: None}, file), name)) == in_environment
    assert getattr(load_settings({**others, name: as_flag}, file), name) == as_flag


def test_the_model_of_all_commands_is_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('store = "s"\nmodel = "filed"\n', encoding="utf-8")
    monkeypatch.setenv("EPIC_RAG_MODEL", "shared")
    assert load_settings({}, file).model == "shared"
    monkeypatch.setenv(f"{ENVIRONMENT}MODEL", "own")
    assert load_settings({}, file).model == "own"
    assert load_settings({"model": "flagged"}, file).model == "flagged"


def test_origins_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENVIRONMENT}ALLOW_ORIGINS", " https://a.example , https://b.example,, ")
    assert load_settings({"store": "s"}).allow_origins == ("https://a.example", "https://b.example")
    monkeypatch.setenv(f"{ENVIRONMENT}ALLOW_ORIGINS", "")
    assert load_settings({"store": "s"}).allow_origins == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "eighty"),
        ("port", "65536"),
        ("port", "-1"),
        ("max_tokens", "0"),
        ("max_model_len", "1"),
        ("request_seconds", "0"),
        ("body_seconds", "nan"),
        ("drain_seconds", "inf"),
        ("console", "perhaps"),
        ("log_level", "loud"),
        ("namespace", ""),
        ("namespace", "n" * 201),
    ],
)
def test_bad_values_are_named_wherever_they_stand(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'{name} = "{value}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=name):
        load_settings({"store": "s"}, file)
    with pytest.raises(ConfigError, match=name):
        load_settings({"store": "s", name: value})
    monkeypatch.setenv(f"{ENVIRONMENT}{name.upper()}", value)
    with pytest.raises(ConfigError, match=name):
        load_settings({"store": "s"})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?=.*store)(?=.*port)(?=.*max_answers)"):
        load_settings({"port": -1, "max_answers": 0})


def test_unknown_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('store = "s"\nprot = 1\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="prot"):
        load_settings({}, file)
    with pytest.raises(ConfigError, match="prot"):
        load_settings({"store": "s", "prot": 1})
    monkeypatch.setenv(f"{ENVIRONMENT}PROT", "1")
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT}PROT"):
        load_settings({"store": "s"})


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        load_settings({"store": "s"}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="check the path"):
        load_settings({"store": "s"}, tmp_path)
    for content in (b"port = ", b"\xff\xfe"):
        bad = tmp_path / "bad.toml"
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match="no TOML"):
            load_settings({"store": "s"}, bad)


def test_the_model_is_shown_by_its_last_name() -> None:
    assert load_settings({"store": "s", "model": "org/name"}).shown_model == "name"
    assert load_settings({"store": "s", "model": "org/name", "model_name": "mine"}).shown_model == "mine"
