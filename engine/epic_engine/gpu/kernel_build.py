"""Every kernel in every configuration that the engine launches, compiled for cards that need not be there."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from epic_engine.attention.kernels import merge, segment, write
from epic_engine.attention.kernels.configs import SegmentConfig, default_config, default_configs
from epic_engine.attention.kernels.tables import Launch, Rotation, Tables

from .kernel_record import Build

__all__ = ["HEADS", "KV_HEADS", "Case", "compile_case", "default_cases"]

HEADS, KV_HEADS = 32, 8
"""Of a Llama with 8 billion parameters; its head size is each configuration's."""
_PAGE = 16
_FIRST_WITH_FLOAT8 = 89
_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIGNED = [["tt.divisibility", 16]]
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)([^;]*);")
_PRODUCT = re.compile(r"[HIQ]MMA|HGMMA|UTC\w*MMA|FFMA")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], *(0x[0-9a-fA-F]+|\d+)")


@dataclass(frozen=True)
class Case:
    """A kernel and what it is launched with.

    Attributes
    ----------
    kernel
        ``"segment"``, ``"merge"`` or ``"write"``.
    dim
        Head size.
    dtype
        Of queries, results or keys.
    config
        Tile of segment attention.
    stored
        Type of stored keys, if it is another.
    options
        What is out of the ordinary: ``"masked"``, ``"turned keys"``, ``"window"``, ``"softcap"``, ``"unrotated"``,
        ``"any order"`` of a head's dimensions, or ``"sinks"``.
    """

    kernel: str
    dim: int
    dtype: torch.dtype
    config: SegmentConfig | None = None
    stored: torch.dtype | None = None
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = [self.kernel, f"{self.dim}", _NAMES[self.dtype]]
        if self.config is not None:
            parts.insert(2, f"{self.config.block_m}x{self.config.block_n}")
        if self.stored is not None:
            parts.append(f"{_NAMES[self.stored]} pages")
        return " ".join((*parts, *self.options))

    def supported(self, arch: int) -> bool:
        """Whether an architecture has the types."""
        return self.stored is not torch.float8_e4m3fn or arch >= _FIRST_WITH_FLOAT8


def default_cases() -> list[Case]:
    """Every default tile, the kernel's variants in the tiles of one head size, merging and writing."""
    tiles = default_configs()
    cases = [Case("segment", c.head_dim, dtype, c) for c, dtype in tiles]
    cases += [Case("segment", c.head_dim, torch.float16, c) for c, dtype in tiles if dtype is torch.bfloat16]
    for config in [c for c, dtype in tiles if dtype is torch.bfloat16 and c.head_dim == 128]:
        for options in (("masked",), ("turned keys",), ("window", "softcap")):
            cases.append(Case("segment", 128, torch.bfloat16, config, options=options))
        for stored in (torch.int8, torch.float8_e4m3fn):
            cases.append(Case("segment", 128, torch.bfloat16, config, stored))
    few = default_config(128, HEADS // KV_HEADS, 1, torch.bfloat16)
    cases += [Case("segment", 128, torch.bfloat16, few, options=(option,)) for option in ("unrotated", "any order")]
    for dim in (16, 32, 80):  # smaller than the tile that they use, or than the next tile's
        cases.append(Case("segment", dim, torch.bfloat16, default_config(dim, HEADS // KV_HEADS, 1, torch.bfloat16)))
    for dim in (64, 128, 256):
        cases += [Case("merge", dim, dtype) for dtype in (torch.bfloat16, torch.float32)]
        cases += [Case("write", dim, dtype) for dtype in (torch.bfloat16, torch.float32)]
    cases.append(Case("merge", 64, torch.bfloat16, options=("sinks",)))
    return cases


# -- what is launched ------------------------------------------------------------------------------------------------


class _Recorder:
    """Stands where a kernel does, and keeps what it would be launched with."""

    def __init__(self) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

        return keep


def _launched(case: Case) -> tuple[Any, _Recorder]:
    """The kernel, and what its own launcher gives it."""
    module = {"segment": segment, "merge": merge, "write": write}[case.kernel]
    attribute = f"{case.kernel}_kernel"
    kernel, recorder = getattr(module, attribute), _Recorder()
    # Nothing can be launched here, and a copy of the launchers' arguments would not follow their changes.
    setattr(module, attribute, recorder)
    try:
        _launch(case)
    finally:
        setattr(module, attribute, kernel)
    return kernel, recorder


def _launch(case: Case) -> None:
    dim, rows = case.dim, 2
    tables = Tables(
        dict.fromkeys(
            ("memories", "masks", "pages", "segments", "readers", "items", "counts", "targets", "row_partials"), rows
        )
        | {"positions": rows, "row_starts": rows + 1},
        torch.device("cpu"),
    )
    factors = torch.zeros(rows, dim // 2, 2)
    rotation = Rotation(
        torch.arange(dim, dtype=torch.int32),
        None if "unrotated" in case.options else factors,
        factors,
        halves="any order" not in case.options,
    )
    out, lse = torch.zeros(rows, HEADS, dim), torch.zeros(rows, HEADS)
    if case.kernel == "merge":
        sinks = torch.zeros(HEADS, dtype=case.dtype) if "sinks" in case.options else None
        merge.merge_partials(out, lse, tables, torch.zeros(rows, HEADS, dim, dtype=case.dtype), sinks)
    elif case.kernel == "write":
        # As a model gives them: a row's heads lie next to each other.
        new = torch.zeros(rows, KV_HEADS, dim, dtype=case.dtype).transpose(0, 1)
        write.write_kv(new, new, tables, 0, rotation)
    else:
        assert case.config is not None
        scaled = case.stored is not None
        masked = "masked" in case.options
        launch = Launch(0, 0, 1, case.config, case.stored or case.dtype, scaled=scaled, masked=masked)
        segment.segment_attention(
            torch.zeros(rows, HEADS, dim, dtype=case.dtype).transpose(0, 1),
            tables,
            launch,
            0,
            rotation,
            out,
            lse,
            page_size=_PAGE,
            kv_heads=KV_HEADS,
            scale=dim**-0.5,
            window=4096 if "window" in case.options else 0,
            softcap=50.0 if "softcap" in case.options else 0.0,
            turn_keys="turned keys" in case.options,
        )


def _source(kernel: Any, launched: _Recorder) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile at this launch, and with which options."""
    values = dict(zip(kernel.arg_names, launched.args, strict=False)) | launched.kwargs
    options = {name: values.pop(name) for name in launched.kwargs if name not in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value, name = values[parameter.name], parameter.name
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[index,] = _ALIGNED  # torch's memory is
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if special and value % 16 == 0:
                attributes[index,] = _ALIGNED
    return ASTSource(kernel, signature, constants, attributes), options


# -- what comes of it ------------------------------------------------------------------------------------------------


def compile_case(case: Case, arch: int) -> Build:
    """Compile a case for an architecture; an error is part of the result."""
    kernel, launched = _launched(case)
    source, options = _source(kernel, launched)
    rows, keys = (case.config.block_m, case.config.block_n) if case.config else (0, 0)
    start = time.perf_counter()
    warps, stages = options["num_warps"], options.get("num_stages", 3)
    shape = {"rows": rows, "keys": keys, "warps": warps, "stages": stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, spilled, reloads = _resources(compiled.asm["cubin"])
    except Exception as error:  # whatever the compiler dislikes
        reason = " ".join(str(error).split()) or type(error).__name__
        return Build(case.name, case.kernel, arch, **shape, error=reason[:300])
    sizes = Counter(int(size, 0) for size in _COPY.findall(compiled.asm["ptx"]))
    return Build(
        case.name,
        case.kernel,
        arch,
        **shape,
        registers=registers,
        spilled=spilled,
        reloads=reloads,
        shared=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        copies=dict(sorted(sizes.items())),
        seconds=time.perf_counter() - start,
    )


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers of a thread, its bytes of local memory, and how often the loop over keys uses those."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = _RESOURCES.search(_cuobjdump("--dump-resource-usage", file.name))
        if found is None:
            raise RuntimeError("cuobjdump says nothing about registers")
        registers, stack, local = map(int, found.groups())
        spilled = max(stack, local)
        return registers, spilled, _reloads(_cuobjdump("-sass", file.name)) if spilled else 0


def _cuobjdump(option: str, file: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, file]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _reloads(code: str) -> int:
    """Uses of local memory in the loop over keys: the shortest one that multiplies matrices."""
    instructions = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(code)]
    loops: list[list[str]] = []
    for at, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target[1], 16) < at:
            loops.append([other for place, other, _ in instructions if int(target[1], 16) <= place <= at])
    multiplying = [loop for loop in loops if any(_PRODUCT.match(name) for name in loop)]
    return sum(name.startswith(("LDL", "STL")) for name in min(multiplying, key=len, default=[]))
