"""Tiles measured on the user's own card: how they are chosen, kept, read and used. No test needs a GPU."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epic_engine import Engine
from epic_engine.attention import triton_backend
from epic_engine.attention.base import PrivateKV, Run, SequenceRows
from epic_engine.attention.kernels import tuned
from epic_engine.attention.kernels.configs import SegmentConfig, default_config, default_configs, segment_config
from epic_engine.attention.kernels.tuned import CardId, TunedTile, candidates
from epic_engine.attention.schedule import Shape, draft
from epic_engine.gpu import tune, tune_problems
from epic_engine.gpu.kernel_build import default_cases
from epic_engine.gpu.shapes import ModelShape

from tests.engine.conftest import use_triton
from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched

CARD = CardId("NVIDIA Toy 1000 (80GB)", "9.0")
BF16 = torch.bfloat16
DEFAULT = default_config(128, 4, 1, BF16)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CardId]:
    """A card that this machine is said to have, and an empty cache folder."""
    monkeypatch.setenv("EPIC_RAG_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned, "card", lambda: CARD)
    tuned._tiles.cache_clear()
    yield CARD
    tuned._tiles.cache_clear()


class Toy:
    """A problem whose times and numbers are given."""

    def __init__(
        self,
        seconds: Callable[[SegmentConfig], float],
        numbers: Callable[[SegmentConfig], Sequence[Tensor]] = lambda _: [torch.tensor([1.0, -3.0, -math.inf])],
        name: str = "toy",
    ) -> None:
        self.name, self._seconds, self._numbers = name, seconds, numbers
        self.measured: list[SegmentConfig] = []

    def numbers(self, config: SegmentConfig) -> Sequence[Tensor]:
        return self._numbers(config)

    def seconds(self, config: SegmentConfig) -> float:
        self.measured.append(config)
        return self._seconds(config)


def choose(*problems: Toy, rounds: int = 3) -> tuple[SegmentConfig, float, list[str]]:
    lines: list[str] = []
    return *tune.choose(DEFAULT, problems, rounds, lines.append), lines


def times(changes: dict[SegmentConfig, float]) -> Callable[[SegmentConfig], float]:
    """One second, but for these."""
    return lambda config: changes.get(config, 1.0)


def keep(path: Path, default: SegmentConfig, tile: SegmentConfig, element: int = 2) -> None:
    result = TunedTile(element, default, tile, 0.8, "toy")
    tune.save(path, CARD, {result.key: result})


# -- which tiles, and which of them is kept --------------------------------------------------------------------


def test_candidates_are_few_and_have_the_same_rows() -> None:
    for default, _ in default_configs():
        tiles = candidates(default)
        assert 3 <= len(tiles) <= 8
        assert len({default, *tiles}) == len(tiles) + 1
        assert {(t.head_dim, t.block_m) for t in tiles} == {(default.head_dim, default.block_m)}
        assert all(t.block_n >= 16 and t.warps >= 1 and t.stages >= 2 for t in tiles)


def test_the_fastest_is_kept() -> None:
    slow, fast = candidates(DEFAULT)[1], candidates(DEFAULT)[4]
    best, ratio, _ = choose(Toy(times({slow: 0.9, fast: 0.6})), Toy(times({slow: 0.8, fast: 0.8})))
    assert best == fast
    assert ratio == pytest.approx(math.sqrt(0.6 * 0.8))


@pytest.mark.parametrize(("seconds", "kept"), [(0.949, True), (0.951, False)])
def test_less_than_five_percent_is_not_worth_a_change(seconds: float, kept: bool) -> None:
    tile = candidates(DEFAULT)[0]
    best, ratio, _ = choose(Toy(times({tile: seconds})), Toy(times({tile: seconds})))
    assert (best, ratio) == ((tile, pytest.approx(seconds)) if kept else (DEFAULT, 1.0))


def test_what_is_slower_on_one_problem_is_not_kept() -> None:
    tile = candidates(DEFAULT)[0]
    assert choose(Toy(times({tile: 0.5})), Toy(times({tile: 1.1})))[0] == DEFAULT


def test_measurements_take_turns_and_count_by_their_median() -> None:
    """A card that becomes slower and slower, and single measurements that went wrong, decide nothing."""
    tile = candidates(DEFAULT)[2]
    count = 0

    def seconds(config: SegmentConfig) -> float:
        nonlocal count
        count += 1
        if config == tile and count < 10:
            return 1e-3
        return 1.004**count

    problem = Toy(seconds)
    assert choose(problem, rounds=7)[0] == DEFAULT
    turn = [DEFAULT, *candidates(DEFAULT)]
    assert problem.measured == turn * 7


@pytest.mark.parametrize(
    "numbers",
    [[1.0, -3.001, -math.inf], [1.0, -3.0, 0.0], [1.0, -3.0, math.nan], [math.inf, -3.0, -math.inf]],
)
def test_other_numbers_are_discarded(numbers: list[float]) -> None:
    wrong, right = candidates(DEFAULT)[0], candidates(DEFAULT)[1]
    given = {wrong: [torch.tensor(numbers)], right: [torch.tensor([1.0 + 1e-6, -3.0, -math.inf])]}
    problem = Toy(times({wrong: 0.1, right: 0.8}), lambda c: given.get(c, [torch.tensor([1.0, -3.0, -math.inf])]))
    best, _, lines = choose(problem)
    assert best == right
    assert wrong not in problem.measured
    (said,) = [line for line in lines if "discarded" in line]
    assert f"{wrong.block_n} keys, {wrong.warps} warps, {wrong.stages} stages" in said


def test_what_does_not_fit_the_card_is_left_out() -> None:
    large = candidates(DEFAULT)[5]

    def numbers(config: SegmentConfig) -> Sequence[Tensor]:
        if config == large:
            raise RuntimeError("out of resource:\nshared memory")
        return [torch.ones(2)]

    best, _, lines = choose(Toy(times({large: 0.1}), numbers))
    assert best == DEFAULT
    assert any("does not run: out of resource: shared memory" in line for line in lines)


# -- the file ----------------------------------------------------------------------------------------------------


def test_a_tuned_tile_is_used_on_its_card(card: CardId, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = candidates(DEFAULT)[4]
    keep(tuned.tiles_path(card), DEFAULT, tile)
    assert segment_config(128, 4, 1, BF16) == tile
    assert segment_config(128, 8, 2, torch.float16) == tile
    for other in ((128, 4, 8, BF16), (64, 4, 1, BF16), (128, 4, 1, torch.float32)):
        assert segment_config(*other) == default_config(*other)
    assert default_config(128, 4, 1, BF16) == DEFAULT
    for another in (CardId(CARD.name, "8.0"), CardId("NVIDIA Toy 1000", "9.0"), None):
        tuned._tiles.cache_clear()
        monkeypatch.setattr(tuned, "card", lambda another=another: another)
        assert segment_config(128, 4, 1, BF16) == DEFAULT


def test_the_file_is_read_once(card: CardId) -> None:
    path, tile = tuned.tiles_path(card), candidates(DEFAULT)[0]
    assert segment_config(128, 4, 1, BF16) == DEFAULT
    keep(path, DEFAULT, tile)
    assert segment_config(128, 4, 1, BF16) == DEFAULT
    tuned._tiles.cache_clear()
    assert segment_config(128, 4, 1, BF16) == tile


def test_another_triton_or_kernel_has_another_file(
    card: CardId, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton

    first = tuned.tiles_path(card)
    assert first.parent == tmp_path / "kernels"
    paths = {first, tuned.tiles_path(CardId(CARD.name, "8.9")), tuned.tiles_path(CardId("Other", "9.0"))}
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "3.5.1+git123")
        paths.add(tuned.tiles_path(card))
    source = Path(tuned.__file__).with_name("segment.py").read_text(encoding="utf-8")
    (tmp_path / "segment.py").write_text(source + "\n", encoding="utf-8")
    monkeypatch.setattr(tuned, "__file__", str(tmp_path / "tuned.py"))
    paths.add(tuned.tiles_path(card))
    assert len(paths) == 5
    assert all(path.name == path.name.strip() and " " not in path.name for path in paths)


def _edit(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | changes


def _entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"tiles": [content["tiles"][0] | changes]}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: json.dumps(content).encode()[:-5],
        lambda content: b"\xff\xfe\x00",
        lambda content: [],
        lambda content: {},
        _edit(tiles=None),
        _edit(tiles=[3]),
        _edit(card="Another card"),
        _edit(capability="8.0"),
        _edit(triton="0.1"),
        _edit(kernel="0" * 64),
        _entry(tile=[48, 4, 5]),
        _entry(tile=[64, 32, 5]),
        _entry(tile=[4096, 4, 5]),
        _entry(tile="64"),
        _entry(default=[64, 4, 3]),
        _entry(rows=48),
        _entry(rows=None),
        _entry(head_dim=100),
        _entry(head_dim="128"),
        _entry(element=3),
        _entry(ratio=-1.0),
        _entry(ratio=None),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(
    card: CardId, caplog: pytest.LogCaptureFixture, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    path = tuned.tiles_path(card)
    keep(path, DEFAULT, candidates(DEFAULT)[0])
    spoilt = spoil(json.loads(path.read_text(encoding="utf-8")))
    path.write_bytes(spoilt if isinstance(spoilt, bytes) else json.dumps(spoilt).encode())
    with caplog.at_level(logging.WARNING):
        assert {segment_config(128, 4, readers, BF16) for readers in (1, 2, 3, 4)} == {DEFAULT}
        assert segment_config(64, 4, 1, BF16) == default_config(64, 4, 1, BF16)
    (record,) = caplog.records
    assert str(path) in record.getMessage()


def test_what_is_saved_is_what_is_read(card: CardId) -> None:
    path = tuned.tiles_path(card)
    results = {}
    for default, dtype in default_configs():
        small = default if default.head_dim != 64 else replace(default, head_dim=32)
        for config in {default, small}:
            result = TunedTile(dtype.itemsize, config, candidates(config)[-1], 0.75, "32,8,128")
            results[result.key] = result
    tune.save(path, card, results)
    assert tuned.read_tiles(path, card) == results
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_that_cannot_be_written_leaves_the_old_one(card: CardId, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.tiles_path(card)
    keep(path, DEFAULT, candidates(DEFAULT)[0])
    old = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        keep(path, DEFAULT, candidates(DEFAULT)[1])
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("interpreted", "kinds", "found"),
    [
        ("0", [("A", 9, 0), ("A", 9, 0)], CardId("A", "9.0")),
        ("0", [("A", 9, 0), ("B", 9, 0)], None),
        ("0", [("A", 9, 0), ("A", 8, 0)], None),
        ("0", [], None),
        ("1", [("A", 9, 0)], None),
    ],
)
def test_which_card_there_is(
    monkeypatch: pytest.MonkeyPatch, interpreted: str, kinds: list[tuple[str, int, int]], found: CardId | None
) -> None:
    cards = [SimpleNamespace(name=name, major=major, minor=minor) for name, major, minor in kinds]
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    assert tuned.card() == found


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> list[SegmentConfig]:
    """The command measures toys on which each tile's last candidate is fastest; returns which it was asked for."""
    asked: list[SegmentConfig] = []

    def problems(default: SegmentConfig, *_: Any) -> list[Toy]:
        asked.append(default)
        return [Toy(times({candidates(default)[-1]: 0.5}))]

    monkeypatch.setattr(tune_problems, "tile_problems", problems)
    return asked


def test_the_command_keeps_what_it_finds(
    card: CardId, toys: list[SegmentConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["--list"]) == 0
    assert "nothing is tuned" in capsys.readouterr().out
    assert tune.main([]) == 0
    assert [config.block_m for config in toys] == [16, 32, 64, 128]
    assert "[4/4]" in capsys.readouterr().err
    for readers in (1, 8, 16, 1024):
        default = default_config(128, 4, readers, BF16)
        assert segment_config(128, 4, readers, BF16) == candidates(default)[-1]
    assert tune.main(["--model-shape", "32,32,80", "--dtype", "float32"]) == 0  # beside the others
    assert len(tuned.read_tiles(tuned.tiles_path(card), card)) == 4 + 2
    capsys.readouterr()
    assert tune.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert str(tuned.tiles_path(card)) in shown
    assert shown.count("heads of 128, 16-bit") == 4
    assert shown.count("heads of 128, 32-bit") == 2
    assert "0.50 of 64 keys, 4 warps, 5 stages" in shown


def test_a_later_run_replaces_what_an_earlier_one_found(
    card: CardId, toys: list[SegmentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tune.main([]) == 0
    monkeypatch.setattr(tune_problems, "tile_problems", lambda *_: [Toy(times({}))])
    assert tune.main([]) == 0
    assert segment_config(128, 4, 1, BF16) == DEFAULT


def test_the_command_forgets(card: CardId, toys: list[SegmentConfig]) -> None:
    import triton

    assert tune.main([]) == 0
    path = tuned.tiles_path(card)
    old = path.with_name(path.name.replace(triton.__version__, "3.1.0"))
    others = [tuned.tiles_path(CardId("NVIDIA Toy 1000", "9.0")), tuned.tiles_path(CardId(CARD.name, "9.1"))]
    for file in (old, *others):
        file.write_bytes(path.read_bytes())
    assert tune.main(["--forget"]) == 0
    assert sorted(path.parent.iterdir()) == sorted(others)
    assert segment_config(128, 4, 1, BF16) == DEFAULT
    assert tune.main(["--forget"]) == 0


def test_a_damaged_file_is_written_anew(
    card: CardId, toys: list[SegmentConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuned.tiles_path(card)
    path.parent.mkdir()
    path.write_text("{", encoding="utf-8")
    assert tune.main([]) == 0
    assert "is ignored" in capsys.readouterr().err
    assert len(tuned.read_tiles(path, card)) == 4


def test_an_interrupted_run_keeps_what_was_finished(
    card: CardId, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def problems(default: SegmentConfig, *_: Any) -> list[Toy]:
        def seconds(config: SegmentConfig) -> float:
            if default.block_m == 64:
                raise KeyboardInterrupt
            return 0.5 if config == candidates(default)[0] else 1.0

        return [Toy(seconds)]

    monkeypatch.setattr(tune_problems, "tile_problems", problems)
    assert tune.main([]) == 130
    assert "stopped" in capsys.readouterr().err
    path = tuned.tiles_path(card)
    assert [key[2] for key in tuned.read_tiles(path, card)] == [16, 32]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_measured_leaves_the_rest(
    card: CardId, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def problems(default: SegmentConfig, *_: Any) -> list[Toy]:
        if default.block_m == 32:
            raise torch.OutOfMemoryError("nothing is left")
        return [Toy(times({}))]

    monkeypatch.setattr(tune_problems, "tile_problems", problems)
    assert tune.main([]) == 1
    assert "not measured: nothing is left" in capsys.readouterr().err
    assert [key[2] for key in tuned.read_tiles(tuned.tiles_path(card), card)] == [16, 64, 128]


@pytest.mark.parametrize("shape", ["32,8", "32,8,x", "32,5,64", "32,8,33", "32,8,512", "0,1,64", "1024,4,64"])
def test_shapes_that_no_model_has(card: CardId, toys: list[SegmentConfig], shape: str) -> None:
    with pytest.raises(SystemExit) as refused:
        tune.main(["--model-shape", shape])
    assert refused.value.code == 2
    assert not toys


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


# -- who uses them -----------------------------------------------------------------------------------------------


def test_the_kernel_report_compiles_default_tiles(card: CardId) -> None:
    before = default_cases()
    keep(tuned.tiles_path(card), DEFAULT, candidates(DEFAULT)[0])
    tuned._tiles.cache_clear()
    assert segment_config(128, 4, 1, BF16) != DEFAULT
    assert default_cases() == before


def test_the_plan_of_a_pass_stays_the_same(card: CardId) -> None:
    shape = Shape(32, 8, 128, BF16, 16, 132)
    spec = ModelShape("toy", 4096, 1, 32, 8, 128, 64, 99).spec(1, BF16)
    kv = torch.zeros(1, 2, 8, 640, 128, dtype=BF16)
    runs = [Run(kv, at, at + 320, offset=at, after=at + 320) for at in (0, 320)]

    def tables() -> tuple[dict[str, int], list[tuple[int, int]], list[int]]:
        batch = [SequenceRows([640 + i], PrivateKV(spec, 16, kv.device), runs) for i in range(3)]
        batch.append(SequenceRows(range(700, 800), PrivateKV(spec, 112, kv.device), runs[:1]))
        made = draft(batch, shape)
        launches = made.launches()
        return made.sizes(), [(x.first_item, x.items) for x in launches], [x.config.block_n for x in launches]

    *before, keys = tables()
    results = {}
    for default, dtype in default_configs():
        if default.head_dim == 128 and dtype is BF16:
            result = TunedTile(2, default, replace(default, block_n=default.block_n // 2), 0.5, "toy")
            results[result.key] = result
    tune.save(tuned.tiles_path(card), card, results)
    tuned._tiles.cache_clear()
    *after, fewer_keys = tables()
    assert after == before
    assert fewer_keys == [count // 2 for count in keys]


@pytest.mark.slow
def test_an_engine_computes_the_same_with_a_tuned_tile(card: CardId, monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    used: set[SegmentConfig] = set()
    attention = triton_backend.segment_attention

    def recording(*arguments: Any, **options: Any) -> None:
        used.add(arguments[2].config)
        attention(*arguments, **options)

    monkeypatch.setattr(triton_backend, "segment_attention", recording)
    model = tiny("qwen3")
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    defaults = {default_config(16, group, readers, torch.float32): None for readers in (1, 100)}
    results = {}
    for default in defaults:
        tile = replace(default, block_n=default.block_n // 2)
        assert tile in candidates(default)
        results[16, 4, default.block_m] = TunedTile(4, default, tile, 0.5, "toy")
    tune.save(tuned.tiles_path(card), card, results)
    ids = [(7 * i * i + 5) % 190 + 3 for i in range(72)]
    with Engine(model, selftest=False, policy="full", max_model_len=128) as engine:
        got = engine.score([ids[:66]], ids[66:])
    assert used
    assert used <= {result.tile for result in results.values()}
    want = plain_logits(untouched(model), ids)[65:-1]
    assert (got.cpu() - want).abs().max() < 1e-4
