"""Two namespaces over one store directory: no road leads from one to the other's chunks.

The oracle is a namespace that never shared a store with anybody: all that a neighbour's chunks may change is disk and
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from epic_engine import (
    ChunkKey,
    ChunkNotFoundError,
    CompileContext,
    ConfigError,
    Engine,
    FileStore,
    MemoryStore,
    SamplingParams,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epic_rag.engines import acquire, folder_name
from epic_rag.errors import DocumentNotFoundError, RegistryError
from epic_rag.texts import CompiledTexts, TextItem
from tests.rag.stack import TEXTS, model, open_rag, tokenizer

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
SECRET = "The vault opens with the number nine four two, says Olaf."
SHARED = TEXTS["bakery"]
QUESTION = (7, 8, 9)


def engine_on(store: Any, namespace: str) -> Engine:
    return Engine(model(), tokenizer=tokenizer(), store=store, namespace=namespace, selftest=False)


@dataclass(frozen=True)
class Tenants:
    """Somebody's engine, another's over the same store, a third that shares one engine, and one that shares nothing."""

    owner: Engine
    others: tuple[Engine, ...]
    alone: Engine
    secret: ChunkKey
    shared: tuple[int, ...]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("shared")
    with engine_on(folder, "a") as owner, engine_on(folder, "b") as other, engine_on(None, "b") as alone:
        ids = tuple(tokenizer().encode(SECRET))
        shared = tuple(tokenizer().encode(SHARED))
        for own in (ids, shared):
            for context in ("isolated", "sink:2"):
                owner.compile(own, context)
        owner.pin([owner.key_of(ids)])
        yield Tenants(owner, (other, owner.for_namespace("b")), alone, owner.key_of(ids), shared)


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(ChunkNotFoundError) as caught:
        call()
    return str(caught.value)


UNKNOWN = ChunkKey("0" * 64)
ROADS: dict[str, Callable[[Engine, ChunkKey], object]] = {
    "generate": lambda e, key: e.generate([key, QUESTION], SHORT),
    "generate behind text": lambda e, key: e.generate([QUESTION, key, QUESTION], SHORT, policy="naive"),
    "generate without chunks": lambda e, key: e.generate([key, QUESTION], SHORT, policy="full"),
    "stream": lambda e, key: e.stream([key, QUESTION], SHORT),
    "streams": lambda e, key: e.streams([key, QUESTION], SHORT, 2),
    "score": lambda e, key: e.score([key], QUESTION),
    "link": lambda e, key: e.link([key, QUESTION]),
    "chunk": lambda e, key: e.chunk(key),
    "pin": lambda e, key: e.pin([key]),
    "compile behind it": lambda e, key: e.compile(QUESTION, CompileContext("neighbours:1", (), (key,))),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_foreign_key_is_an_unknown_key(tenants: Tenants, road: str, which: int) -> None:
    """The same error, word for word: it does not tell whether somebody else has the chunk."""
    other = tenants.others[which]
    foreign = _error(lambda: ROADS[road](other, tenants.secret))
    unknown = _error(lambda: ROADS[road](other, UNKNOWN))
    assert foreign.replace(tenants.secret.hex, UNKNOWN.hex) == unknown
    ROADS[road](tenants.owner, tenants.secret)  # the road is one


@pytest.mark.parametrize("which", [0, 1])
def test_what_answers_in_silence_says_nothing_either(tenants: Tenants, which: int) -> None:
    other, secret = tenants.others[which], tenants.secret
    ids = tuple(tokenizer().encode(SECRET))
    before = tenants.owner.stats()["memory"]["residency"]
    assert not other.has(secret)
    assert other.find(ids) is None
    assert other.forms(ids) == []
    assert other.forget([secret]) == other.erase([ids]) == 0
    other.prefetch([secret])
    other.unpin([secret])
    other.drain()
    assert tenants.owner.has(secret)
    after = tenants.owner.stats()["memory"]["residency"]
    assert (before["chunks"], before["prefetched"]) == (after["chunks"], after["prefetched"])
    assert other.key_of(ids) == tenants.alone.key_of(ids) != secret


@pytest.mark.parametrize("which", [0, 1])
def test_nobody_continues_anothers_prompt(tenants: Tenants, which: int) -> None:
    with closing(tenants.owner.link([tenants.secret, QUESTION])) as linked:
        for use in (
            lambda e: e.link([QUESTION], after=linked),
            lambda e: e.stream([QUESTION], SHORT, after=linked),
            lambda e: e.extend([(linked, [5])]),
        ):
            with pytest.raises(ConfigError, match="another namespace"):
                use(tenants.others[which])
            use(tenants.owner)
        tenants.owner.drain()


def _hexadecimal(key: ChunkKey) -> st.SearchStrategy[str]:
    """Keys, the secret one, what is nearly it, and what is none."""
    places = st.tuples(st.integers(0, 63), st.sampled_from("0123456789abcdefABCDEFxg./\\\0 '\"%"))
    near = places.map(lambda at: key.hex[: at[0]] + at[1] + key.hex[at[0] + 1 :])
    return st.just(key.hex) | near | st.text("0123456789abcdef", min_size=64, max_size=64) | st.text(max_size=70)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_whatever_key_is_sent(tenants: Tenants, data: st.DataObject) -> None:
    text = data.draw(_hexadecimal(tenants.secret))
    try:
        key = ChunkKey(text)
    except ConfigError:
        return
    for other in tenants.others:
        ROADS[data.draw(st.sampled_from(("generate", "link", "chunk", "pin", "score")))]
        assert not other.has(key)
        with pytest.raises(ChunkNotFoundError):
            other.generate([key, QUESTION], SHORT)


@pytest.mark.parametrize("policy", ["naive", "legolink:4", "query_aware:0.5", "full", "prefix"])
@pytest.mark.parametrize("which", [0, 1])
def test_answers_are_those_of_a_namespace_on_its_own(tenants: Tenants, policy: str, which: int) -> None:
    """With the same text in both, and the owner's prompts asked before."""
    head = (90 + which,)  # not what the other parameter has left in the prefix cache
    theirs = [head, tenants.owner.key_of(tenants.shared), QUESTION]
    for prompt in ([tenants.secret, *theirs], theirs):
        tenants.owner.generate(prompt, SHORT, policy=policy)
    answers = []
    for own in (tenants.others[which], tenants.alone):
        key = own.compile(tenants.shared)
        done = own.generate([head, key, QUESTION], SHORT, policy=policy)
        logits = own.score([head, key, QUESTION], [5, 6], policy=policy)
        answers.append((key, done.token_ids, done.stats.reused, done.stats.linked, logits.tolist()))
        own.forget([key])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", [FileStore, MemoryStore])
def test_stores_keep_namespaces_apart(tmp_path: Path, kind: Any) -> None:
    store = kind(tmp_path) if kind is FileStore else kind()
    with engine_on(store, "a") as one, engine_on(store, "b") as other:
        keys = [one.compile(tokenizer().encode(text)) for text in TEXTS.values()]
        mine = other.compile(tokenizer().encode(SHARED))
        assert store.erase("b", [one.chunk(k).key.hex for k in keys]) == 0
        assert store.erase_namespace("b") == 1
        assert not other.has(mine)
        assert all(map(one.has, keys))
    store.close()


# -- texts and documents -------------------------------------------------------------------------------------------


def test_ids_of_texts_lead_to_ones_own(tmp_path: Path) -> None:
    """Explicit ids and discovery: what frameworks send."""
    lease = {n: acquire(model(), tokenizer=tokenizer(), selftest=False, store=tmp_path, namespace=n) for n in "ab"}
    with lease["a"], lease["b"]:
        owner, other = lease["a"].texts("isolated"), lease["b"].texts("isolated")
        owner.add([TextItem("secret", SECRET, group="g"), TextItem("text", SHARED)])
        other.add([TextItem("text", "Something else stands under this id in the other namespace.")])
        for name in ("secret", "text", "secret#0", "%", "' OR 1=1 --", "*", "../a/secret", "\0"):
            assert [part.name for part in other.finder([name])(f"{SECRET}\n{SHARED}") if part.name] == []
        assert [part.name for part in other.find(SECRET)] == [None]
        assert [part.name for part in owner.find(SECRET)] == ["secret"]
        assert other.group("g") == other.remove_group("g") == []
        assert other.remove(["secret"]) == 0
        assert other.ids() == ["text"]
        with pytest.raises(DocumentNotFoundError) as foreign:
            other.text("secret")
        with pytest.raises(DocumentNotFoundError) as unknown:
            other.text("nobody")
        assert str(foreign.value).replace("secret", "nobody") == str(unknown.value)
        assert owner.text("secret") == SECRET


def test_a_registry_serves_one_namespace(tmp_path: Path) -> None:
    """Its texts are retrieved and found, so that it must not be opened for another."""
    with open_rag(tmp_path, namespace="a") as rag:
        rag.add(texts={"secret": SECRET})
    with pytest.raises(RegistryError, match=r"namespace = 'a', not 'b'.*new directory"):
        open_rag(tmp_path, namespace="b")
    with open_rag(tmp_path, namespace="a") as rag:
        assert rag.retrieve("vault", 1)[0].text.startswith("The vault")
    with engine_on(None, "a") as one, CompiledTexts(tmp_path / "texts", one, context="isolated"):
        pass
    with engine_on(None, "b") as other, pytest.raises(RegistryError, match="namespace"):
        CompiledTexts(tmp_path / "texts", other, context="isolated")


@settings(max_examples=300, deadline=None)
@given(name=st.text(min_size=1, max_size=300), other=st.text(min_size=1, max_size=300))
@example(name="..", other=".")
@example(name="../../x", other="..%2F..%2Fx")
@example(name="%2E%2E", other="..")
@example(name="a/b", other="a")
@example(name="x" * 200, other="x" * 201)
@example(name="x" * 201, other="x" * 202)
@example(name="\u00e4" * 300, other="\u00e4" * 299)
def test_folders_of_namespaces(name: str, other: str) -> None:
    """One name of a file each, never one that leads elsewhere."""
    folder = folder_name(name)
    assert Path("home", folder).parent == Path("home")
    assert folder not in ("", ".", "..")
    assert not set(folder) & set("/\\\0:")
    assert len(folder.encode()) <= 255
    assert (folder == folder_name(other)) == (name == other)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 1025, "\u00e4" * 600])
def test_namespaces_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 1024 bytes"):
        engine_on(None, name)


@pytest.mark.parametrize("name", ["..", ".", "../../x", "a/b", "\u00e4" * 300, "C:x", "' OR '1'='1"])
def test_texts_stay_in_the_store(tmp_path: Path, name: str) -> None:
    store = tmp_path / "one" / "two" / "store"
    with acquire(model(), tokenizer=tokenizer(), selftest=False, store=store, namespace=name) as lease:
        texts = lease.texts("isolated")
        texts.add([TextItem(name, SECRET, group=name)])
        assert texts.ids() == [name]
    made = [path.relative_to(store) for path in tmp_path.rglob("*.sqlite")]
    assert sorted(path.parts[0] for path in made) == ["chunks", "texts"]
    assert sorted(map(len, (path.parts for path in made))) == [2, 3]
