"""Encodings of stored KV: against float64, on hostile bytes, and what an engine makes of them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from epic_engine import ChunkStore, ConfigError, Engine, FileStore, MemoryStore, StoreError
from epic_engine.storage.payload import (
    ENCODINGS,
    decode,
    encode,
    encoded_nbytes,
    encoding_for,
    fingerprint_for,
    joined,
    rounded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .kv_memory import chunk
from .models import tiny

SIZES = st.integers(1, 3)
SHAPES = st.tuples(SIZES, st.just(2), SIZES, st.integers(1, 40), st.sampled_from((1, 8, 12, 64)))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64))
EVERY = [base + end for base in ENCODINGS for end in ("", "+zstd")]
EIGHT_BITS = ("int8", "fp8")


def kv_of(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 4.0) -> Tensor:
    """Random KV whose magnitudes differ by powers of ten from number to number."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return (numbers * 10 ** (spread * (torch.rand(tuple(shape), generator=generator).double() - 0.8))).to(dtype)


def back(kv: Tensor, encoding: str) -> Tensor:
    kept = encode(kv, encoding)
    assert kept.nbytes == joined(kept).numel()
    return decode(joined(kept), kept.encoding, kept.shape, kept.dtype)


def possible(encoding: str, dtype: torch.dtype) -> bool:
    return not encoding.startswith("bf16") or dtype.itemsize > 2


def turned(kv: Tensor) -> Tensor:
    """KV in float64, keys turned by the Hadamard matrix, written down entry by entry: its sign is that of the bits
    that row and column share.
    """
    dim = kv.shape[-1]
    size = dim & -dim  # the largest power of two that divides it
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        for j in range(i // size * size, i // size * size + size):
            matrix[i, j] = (-1) ** (i % size & j % size).bit_count() / size**0.5
    found = kv.double().clone()
    found[:, 0] = found[:, 0] @ matrix
    return found


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 9), encoding=st.sampled_from(EVERY))
def test_what_comes_back(shape: tuple[int, ...], dtype: torch.dtype, seed: int, encoding: str) -> None:
    if not possible(encoding, dtype):
        return
    kv = kv_of(shape, dtype, seed)
    found = back(kv, encoding)
    assert (found.shape, found.dtype, found.device) == (kv.shape, dtype, kv.device)
    base = encoding.removesuffix("+zstd")
    if not encoding.endswith("+zstd"):
        assert encode(kv, encoding).nbytes == encoded_nbytes(shape, dtype, encoding)
    if base == "raw":
        assert torch.equal(found, kv)
    elif base == "bf16":
        assert torch.equal(found, kv.to(torch.bfloat16).to(dtype))
    else:
        exact, read = turned(kv), turned(found)
        # A scale has eight digits; what it is off by, all numbers of its token are.
        step = exact.abs().amax(-1, keepdim=True) / (127 if base == "int8" else 448) * (1 + 2**-8)
        nearest = step / 2 if base == "int8" else torch.maximum(exact.abs() / 16, step * 2.0**-10)
        # The result is rounded to the KV's own type, before keys are turned to be compared.
        last = torch.finfo(dtype).eps / 2 * found.double().norm(dim=-1, keepdim=True)
        assert ((read - exact).abs() <= nearest * (1 + 1e-5) + step * 1e-4 + last + 1e-36).all()


def test_a_scale_serves_its_own_token_alone() -> None:
    kv = torch.full((2, 2, 2, 20, 8), 1e-3)
    kv[1, 1, 1, 3] = kv[0, 0, 1, 7] = 1e6
    for encoding in EIGHT_BITS:
        found = back(kv, encoding)
        assert torch.allclose(found, kv, rtol=2e-2, atol=1e-5)


def test_one_large_dimension_leaves_the_others_of_a_key_their_digits() -> None:
    """Keys of language models have such dimensions; values do not, and are not turned."""
    kv = kv_of((2, 2, 2, 20, 64), spread=0.0)
    kv[..., 5] = 40
    for_keys, for_values = ((back(kv, "int8") - kv)[:, side].norm() for side in (0, 1))
    assert for_keys < for_values / 3


@pytest.mark.parametrize("encoding", EVERY)
def test_nothing_but_zeros(encoding: str) -> None:
    kv = torch.zeros(2, 2, 1, 17, 8)
    assert torch.equal(back(kv, encoding), kv)


@pytest.mark.parametrize("encoding", EIGHT_BITS)
def test_the_smallest_and_the_largest_numbers(encoding: str) -> None:
    for value in (1e-45, 1e-40, 1e-38, 1.0, 1e37):
        kv = torch.full((1, 2, 1, 3, 8), value)
        kv[..., 1] *= -1
        assert torch.allclose(back(kv, encoding), kv, rtol=7e-2, atol=1e-36)
    # Where a rounded scale would lead beyond float16, the result stays finite.
    half = torch.full((1, 2, 1, 3, 8), 65504.0, dtype=torch.float16)
    half[..., 0, 0] = 65000.0
    assert torch.allclose(back(half, encoding).float(), half.float(), rtol=6e-2)


def test_eight_bits_take_half_of_sixteen() -> None:
    for tokens in (16, 600, 4096):
        kv = torch.zeros(2, 2, 3, tokens, 64, dtype=torch.bfloat16)
        for encoding in EIGHT_BITS:
            assert encode(kv, encoding).nbytes <= 0.52 * encode(kv, "raw").nbytes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    kv = kv_of((2, 2, 2, 20, 8), torch.float64)
    kv[1, 1, 0, 19, 3] = bad
    for encoding in ("bf16", "int8", "fp8", "int8+zstd"):
        with pytest.raises(ValueError, match="damaged"):
            encode(kv, encoding)
    assert torch.equal(back(kv, "raw").nan_to_num(), kv.nan_to_num())


def test_raw_is_a_view_and_the_rest_a_copy() -> None:
    kv = kv_of((2, 2, 2, 5, 8))
    assert encode(kv, "raw").parts[0].data_ptr() == kv.data_ptr()
    payload_ = joined(encode(kv, "raw"))
    assert decode(payload_, "raw", kv.shape, kv.dtype).data_ptr() == payload_.data_ptr()
    # From any place of a larger buffer, such as a file that was cut oddly.
    for encoding in ENCODINGS:
        data = joined(encode(kv, encoding))
        shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
        assert torch.equal(decode(shifted, encoding, kv.shape, kv.dtype), decode(data, encoding, kv.shape, kv.dtype))


def test_what_is_written_is_what_is_documented() -> None:
    """Scales, then numbers, little endian; read here without the package."""
    kv = kv_of((2, 2, 1, 9, 12), torch.bfloat16)
    exact = turned(kv)
    for encoding, largest, dtype in (("int8", 127, torch.int8), ("fp8", 448, torch.float8_e4m3fn)):
        data = bytes(joined(encode(kv, encoding)).tolist())
        scales = torch.frombuffer(bytearray(data[: 2 * 36]), dtype=torch.bfloat16).view(2, 2, 1, 9, 1).double()
        numbers = torch.frombuffer(bytearray(data[2 * 36 :]), dtype=dtype).view(kv.shape).double()
        assert torch.allclose(scales, exact.abs().amax(-1, keepdim=True) / largest, rtol=2**-8)
        assert torch.allclose(turned(numbers * scales), back(kv, encoding).double(), rtol=2**-8, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    encoding=st.sampled_from(EVERY),
    dtype=DTYPES,
    how=st.sampled_from(["random", "cut", "longer", "flipped", "empty"]),
    seed=st.integers(0, 10_000),
)
def test_damaged_payloads_raise_value_errors_alone(encoding: str, dtype: torch.dtype, how: str, seed: int) -> None:
    if not possible(encoding, dtype):
        return
    drawn = random.Random(seed)
    kv = kv_of((2, 2, 2, drawn.randrange(1, 40), 8), dtype, seed)
    data = joined(encode(kv, encoding)).clone()
    if how == "random":
        data = torch.tensor([drawn.randrange(256) for _ in range(len(data))], dtype=torch.uint8)
    elif how == "cut":
        data = data[: drawn.randrange(len(data))]
    elif how == "longer":
        data = torch.cat([data, data[: drawn.randrange(1, len(data))]])
    elif how == "empty":
        data = data[:0]
    else:
        for _ in range(drawn.randrange(1, 9)):
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    try:
        found = decode(data, encoding, kv.shape, dtype)
    except ValueError:
        return
    assert how in ("random", "flipped")  # any other length is noticed
    assert (found.shape, found.dtype) == (kv.shape, dtype)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (2, 2, 2, 8),
        (2, 3, 2, 20, 8),
        (2, 2, 2, 0, 8),
        (2, 2, 2, -20, 8),
        (2, 2, 2, 20.0, 8),
        (2, 2, True, 20, 8),
        (2, 2, 2, 2**62, 8),
        (2, 2, 2, 21, 8),
        (2, 2, 2, 20, 16),
    ],
)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    kv = kv_of((2, 2, 2, 20, 8))
    for encoding in EVERY:
        with pytest.raises(ValueError):  # noqa: PT011
            decode(joined(encode(kv, encoding)), encoding, shape, kv.dtype)


def test_other_types_and_encodings_are_refused() -> None:
    kv = kv_of((2, 2, 2, 20, 8))
    data = joined(encode(kv, "raw"))
    for encoding in ("", "int4", "INT8", "zstd", "raw+", "raw+gzip", "int8+zstd+zstd"):
        for call in (lambda e=encoding: encode(kv, e), lambda e=encoding: decode(data, e, kv.shape, kv.dtype)):
            with pytest.raises(ValueError, match=r"raw, bf16, int8, fp8.*zstd"):
                call()
    for dtype in (torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="floating-point"):
            decode(data, "raw", kv.shape, dtype)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="use raw"):
            encode(kv.to(dtype), "bf16")
    for wrong in (data.view(torch.int8), data.view(2, -1), data[::2]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            decode(wrong, "raw", kv.shape, kv.dtype)


def test_a_small_frame_cannot_fill_the_memory() -> None:
    """A frame that would yield gigabytes is refused by its header, or stopped where its header lies."""
    zstandard = pytest.importorskip("zstandard")
    shape = (2, 2, 2, 20, 8)
    expected = encoded_nbytes(shape, torch.float32, "raw")
    block = b"\0" * (1 << 20)
    honest = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    bomb = b"".join([*(honest.compress(block) for _ in range(1 << 10)), honest.flush()])
    assert len(bomb) < 1 << 20
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(block)
    two = zstandard.ZstdCompressor().compress(b"\0" * expected) * 2
    lying = bytearray(zstandard.ZstdCompressor().compress(b"\0" * 300))
    lying[5:7] = (expected - 256).to_bytes(2, "little")  # the header's size, less 256, in two bytes
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == expected
    for frame in (bomb, silent, two, bytes(lying)):
        before = memory_peak()
        with pytest.raises(ValueError):  # noqa: PT011
            decode(torch.frombuffer(bytearray(frame), dtype=torch.uint8), "raw+zstd", shape, torch.float32)
        assert memory_peak() - before < 64 << 20


def memory_peak() -> int:
    """Most memory that this process has held, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_without_zstd_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = kv_of((1, 2, 1, 3, 8))
    data = joined(encode(kv, "int8"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(StoreError, match="pip install zstandard"):
        encode(kv, "int8+zstd")
    # Not a ValueError: the chunk is not damaged and must not be set aside.
    with pytest.raises(StoreError, match="pip install zstandard"):
        decode(data, "int8+zstd", kv.shape, kv.dtype)
    assert torch.equal(decode(data, "int8", kv.shape, kv.dtype), back(kv, "int8"))


def test_which_encoding_a_model_gets() -> None:
    assert encoding_for("auto", torch.float16) == encoding_for("auto", torch.float32) == "raw"
    assert encoding_for("bf16", torch.bfloat16) == "raw"
    assert encoding_for("bf16", torch.float32) == "bf16"
    assert encoding_for("int8", torch.bfloat16) == "int8"
    with pytest.raises(ConfigError, match="float16"):
        encoding_for("bf16", torch.float16)
    names = {fingerprint_for("f" * 64, e) for e in ENCODINGS}
    assert len(names) == len(ENCODINGS)
    assert fingerprint_for("f" * 64, "raw") == "f" * 64
    assert all(fingerprint_for("f" * 64, e) == fingerprint_for("f" * 64, f"{e}+zstd") for e in ENCODINGS)


def test_rounded_is_what_comes_back() -> None:
    kv = kv_of((2, 2, 2, 20, 8))
    assert rounded(kv, "raw") is kv
    for encoding in EVERY[2:]:
        assert torch.equal(rounded(kv, encoding), back(kv, encoding))
    with pytest.raises(ConfigError, match="auto, bf16, int8, fp8"):
        Engine(tiny("llama"), kv_dtype="int4")


# -- stores and engines --------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "files", "compressed files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkStore]:
    if request.param == "memory":
        made: ChunkStore = MemoryStore()
    else:
        made = FileStore(tmp_path / "store", compression="zstd" if "compressed" in request.param else None)
    with contextlib.closing(made):
        yield made


def test_a_store_keeps_what_the_entry_says(store: ChunkStore) -> None:
    entries = []
    for number, encoding in enumerate(ENCODINGS):
        info, kv = chunk(number, 33)
        entries.append((replace(info, encoding=encoding), kv))
    store.put(entries)
    for info, kv in entries:
        assert torch.equal(store.load(info.key), rounded(kv, info.encoding))
        found = store.info(info.key)
        assert found is not None
        assert torch.equal(rounded(kv, found.encoding), rounded(kv, info.encoding))
    info, kv = entries[2]
    with pytest.raises(StoreError, match="damaged"):
        store.put([(info, torch.full_like(kv, torch.nan))])
    assert torch.equal(store.load(info.key), rounded(kv, info.encoding))
    assert store.verify().clean


def test_stores_take_what_is_kept_and_no_more(store: ChunkStore) -> None:
    taken = {}
    for number, encoding in enumerate(("raw", "int8")):
        info, _ = chunk(number, 64)
        store.put([(replace(info, namespace=encoding, encoding=encoding), kv_of((4, 2, 4, 64, 64), spread=0.0))])
        taken[encoding] = store.usage().models[encoding, info.fingerprint][1]
    assert taken["int8"] < 0.27 * taken["raw"]  # of float32


def test_engines_of_different_types_have_different_chunks(store: ChunkStore) -> None:
    """What one engine has stored is a miss to another that keeps chunks otherwise; each reads what it keeps."""
    model = tiny("llama")
    ids, other = list(range(5, 45)), list(range(60, 90))
    kv = {}
    for kv_dtype in ("auto", "bf16", "int8", "fp8"):
        with Engine(model, store=store, selftest=False, kv_dtype=kv_dtype) as engine:
            assert engine.find(ids) is None
            key = engine.compile(ids)
            kv[kv_dtype] = engine.chunk(key).kv
            info = store.info(key)
            assert info is not None
            encoding = encoding_for(kv_dtype, torch.float32)
            assert (info.nbytes, info.encoding.removesuffix("+zstd")) == (kv["auto"].nbytes, encoding)
            bytes_kept = encoded_nbytes(kv["auto"].shape, torch.float32, encoding)
            assert engine.estimate([ids], known_too=True).disk_bytes == bytes_kept
            behind = engine.compile_neighbours([ids], [[other]])[0]
            logits = engine.score([behind, [3, 4]], [5, 6], policy="naive")
            assert torch.isfinite(logits).all()
    for kv_dtype, found in kv.items():
        assert torch.equal(found, rounded(kv["auto"], encoding_for(kv_dtype, torch.float32)))
    assert len({i.key for i in store.entries()}) == 4 * 3


def test_a_chunk_that_is_compiled_again_is_rounded_as_the_stored_one(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from epic_engine.memory.load_rates import LoadRates

    ids, answer = list(range(5, 45)), [7, 8, 9]
    with Engine(tiny("llama"), store=store, selftest=False, kv_dtype="int8") as engine:
        key = engine.compile(ids)
        stored = engine.score([key, [3]], answer, policy="naive")
        engine._serving.residency.clear()
        monkeypatch.setattr(LoadRates, "recompute", lambda *_: True)
        again = engine.score([key, [3]], answer, policy="naive")
        assert engine.stats()["memory"]["residency"]["loads"]["recomputed"]["count"] == 1
    assert torch.equal(stored, again)


def test_half_precision_models_cannot_be_kept_as_bf16() -> None:
    with pytest.raises(ConfigError, match="float16"):
        Engine(tiny("llama", torch.float16), selftest=False, kv_dtype="bf16")
