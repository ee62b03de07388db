"""Files of keys, and who a header is. No error and no log line may show a key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError

from epic_rag.server import keys
from epic_rag.server.keys import KeyRing

SECRET = "sk-a-secret-of-ann-0123456789"
OTHER = "sk-a-secret-of-bob-0123456789"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "keys.toml"
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return path

    return written


def opened(path: Path) -> KeyRing:
    return KeyRing.open(path, "unused")


def test_keys_stand_in_clear_or_as_digests(write: Any) -> None:
    path = write(
        f'[[keys]]\nname = "ann"\nkey = "{SECRET}"\nnamespace = "a"\nrequests_per_minute = 3\n'
        f'[[keys]]\nname = "bob"\nsha256 = "{digest(OTHER)}"\ntokens_per_minute = 9\nmetrics = true\n'
    )
    ring = opened(path)
    ann, bob = ring.find(f"Bearer {SECRET}"), ring.find(f"bearer  {OTHER} ")
    assert ann is not None
    assert bob is not None
    assert (ann.name, ann.namespace, ann.requests_per_minute, ann.tokens_per_minute) == ("ann", "a", 3, None)
    assert (bob.name, bob.namespace, bob.tokens_per_minute) == ("bob", "default", 9)
    assert (ann.metrics, bob.metrics) == (False, True)
    assert ring.namespaces == {"a", "default"}
    assert ring.required
    assert SECRET not in repr(ring.__dict__)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer{SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET.upper()}",
        f"Bearer {digest(SECRET)}",
        f"Bearer Bearer {SECRET}",
        "Bearer \xff\udc80",
    ],
)
def test_anything_else_is_nobody(write: Any, header: str | None) -> None:
    assert opened(write(f'[[keys]]\nname = "ann"\nkey = "{SECRET}"\n')).find(header) is None


def test_a_key_is_compared_with_all_keys_whatever_it_is(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = opened(write("".join(f'[[keys]]\nname = "{n}"\nkey = "{SECRET}{n}"\n' for n in range(5))))
    compared: list[tuple[str, str]] = []

    class Noting:
        @staticmethod
        def compare_digest(a: str, b: str) -> bool:
            compared.append((a, b))
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(keys, "hmac", Noting)
    for given in (f"{SECRET}0", f"{SECRET}4", "wrong", ""):
        compared.clear()
        found = ring.find(f"Bearer {given}")
        assert (found is not None) == given.startswith(SECRET)
        assert compared == [(digest(f"{SECRET}{n}"), digest(given)) for n in range(5)]


def test_without_a_file_everybody_is_anonymous() -> None:
    ring = KeyRing.open(None, "mine")
    assert not ring.required
    assert ring.namespaces == {"mine"}
    for header in (None, "", "Bearer whatever", "Basic x"):
        found = ring.find(header)
        assert found is not None
        assert (found.name, found.namespace, found.metrics) == ("anonymous", "mine", True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"\[\[keys\]\]"),
        ("keys = []", r"\[\[keys\]\]"),
        (f'keys = "{SECRET}"', r"\[\[keys\]\]"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n[other]\nx = 1', r"\[\[keys\]\]"),
        (f'keys = ["{SECRET}"]', "cannot be used"),
        (f'[[keys]]\nkey = "{SECRET}"', "name"),
        (f'[[keys]]\nname = ""\nkey = "{SECRET}"', "name"),
        ('[[keys]]\nname = "a"', "either key or sha256"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\nsha256 = "{digest(SECRET)}"', "either key or sha256"),
        ('[[keys]]\nname = "a"\nkey = "sk-secret"', "key"),
        (f'[[keys]]\nname = "a"\nkey = " {SECRET}"', "key"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}é"', "key"),
        (f'[[keys]]\nname = "a"\nsha256 = "{SECRET}"', "sha256"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\nnamespace = ""', "namespace"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\nrequests_per_minute = 0', "requests_per_minute"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\nadmin = "{SECRET}"', "admin"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n[[keys]]\nname = "a"\nkey = "{OTHER}"', "same name"),
        (f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n[[keys]]\nname = "b"\nkey = "{SECRET}"', "same key"),
        (
            f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n[[keys]]\nname = "b"\nsha256 = "{digest(SECRET)}"',
            "same key",
        ),
        (f'[[keys]]\nname = "a"\nkey = {SECRET}', "no TOML"),
    ],
)
def test_files_that_cannot_be_used_are_refused_without_showing_a_key(
    write: Any, text: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        opened(write(text))
    error: BaseException | None = refused.value
    assert "keys.toml" in str(error)
    while error is not None:
        assert "secret" not in str(error)
        error = None if error.__suppress_context__ and error.__cause__ is None else error.__cause__ or error.__context__
    assert "secret" not in caplog.text


def test_a_file_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path / "none.toml")


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX's")
def test_a_file_that_others_can_read_is_warned_of(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    text = f'[[keys]]\nname = "ann"\nkey = "{SECRET}"\n'
    with caplog.at_level(logging.WARNING):
        opened(write(text))
        assert not caplog.records
        for mode in (0o640, 0o604, 0o644):
            caplog.clear()
            opened(write(text, mode))
            assert "chmod 600" in caplog.text
            assert SECRET not in caplog.text
