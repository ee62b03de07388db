"""Engines that are shared."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from epic_engine import ConfigError, EngineClosedError, ModelLoadError

from epic_rag import engines
from epic_rag.engines import Lease, acquire, close_all
from epic_rag.texts import TextItem
from tests.rag.stack import model, save_model, tokenizer


def lease(**options: Any) -> Lease:
    return acquire(model(), tokenizer=tokenizer(), selftest=False, **options)


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    yield
    assert not engines._engines


def test_equal_settings_share_and_the_last_one_closes() -> None:
    one, two, other = lease(), lease(), lease(namespace="b")
    engine = one.engine
    assert two.engine is engine
    assert other.engine is not engine
    one.close()
    one.close()
    assert two.engine.compile([1, 2, 3])
    with pytest.raises(EngineClosedError, match="acquire"):
        _ = one.engine
    two.close()
    with pytest.raises(EngineClosedError):
        engine.compile([1, 2, 3])
    assert other.engine.compile([1, 2, 3])
    other.close()
    with lease() as again:
        assert again.engine is not engine


def test_texts_are_shared_and_namespaces_are_apart(tmp_path: Path) -> None:
    with lease(store=tmp_path) as one, lease(store=tmp_path) as two, lease(store=tmp_path, namespace="a/b") as other:
        texts = one.texts("isolated", "naive")
        texts.add([TextItem("a", "The crane lifts four tonnes.")])
        assert two.texts("isolated", "naive") is texts
        assert str(two.texts("isolated", "legolink:4").policy) == "legolink:4"
        assert two.texts("isolated", "legolink:4").ids() == ["a"]
        assert other.texts("isolated").ids() == []
    with lease(store=tmp_path) as later:
        assert later.texts("isolated").ids() == ["a"]
        assert later.engine.has(later.texts("isolated").key_of("a"))


def test_in_memory_texts_live_as_long_as_their_leases() -> None:
    with lease() as one:
        with lease() as two:
            two.texts("isolated").add([TextItem("a", "The crane lifts four tonnes.")])
        assert one.texts("isolated").ids() == ["a"]
        folder = one.texts("isolated").registry._path.parent
        assert folder.exists()
    assert not folder.exists()


def test_many_threads_load_one_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = engines.Engine
    monkeypatch.setattr(engines, "Engine", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    got: list[Lease] = []
    threads = [threading.Thread(target=lambda: got.append(lease())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert {id(x.engine) for x in got} == {id(made[0])}
    for x in got:
        x.close()


def test_what_fails_to_open_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        acquire(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match="Known options"):
        lease(speed="fast")
    with pytest.raises(ConfigError, match="plain"):
        lease(rows_per_step=[1])


def test_a_path_is_known_by_where_it_leads(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    with acquire(folder, selftest=False) as one, acquire(str(tmp_path / "link"), selftest=False) as two:
        assert one.engine is two.engine


def test_everything_is_closed_at_exit(tmp_path: Path) -> None:
    script = (
        "from tests.rag.stack import model, tokenizer\n"
        "from epic_rag import engines\n"
        "lease = engines.acquire(model(), tokenizer=tokenizer(), selftest=False)\n"
        "engine, folder = lease.engine, lease.texts('isolated').registry._path.parent\n"
        "import atexit; atexit.unregister(engines.close_all)\n"
        "atexit.register(lambda: print(engine._closed.is_set(), folder.exists()))\n"
        "atexit.register(engines.close_all)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    held = lease()
    close_all()
    with pytest.raises(EngineClosedError):
        held.engine.compile([1, 2])
    held.close()
