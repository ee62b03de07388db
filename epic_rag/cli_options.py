"""Options that several commands have: their names, what they mean and what help says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "ContextOption",
    "DatasetOption",
    "DeviceOption",
    "DtypeOption",
    "JsonFileOption",
    "JsonOption",
    "KOption",
    "KvDtypeOption",
    "ModelOption",
    "PolicyOption",
    "StoreOption",
    "TokensOption",
    "YesOption",
]

StoreOption = Annotated[Path, typer.Option("--store", help="Directory of documents and compiled chunks.")]
ModelOption = Annotated[
    str, typer.Option("--model", help="Folder, hub id, .gguf file or 'smollm2'.", envvar="EPIC_RAG_MODEL")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help="Link policy, e.g. full, naive, legolink:16; auto is the store's own.")
]
ContextOption = Annotated[
    str,
    typer.Option("--context", help="Compile context: isolated, sink:n, head, neighbours:n; auto is the store's own."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        help="What compiled chunks are kept as: bf16, int8 or fp8; auto is the store's own, at first as computed.",
    ),
]
KOption = Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks to retrieve.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")]
DatasetOption = Annotated[
    str, typer.Option("--dataset", help="A file or generated data set, as `epic-rag eval` takes them.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
JsonFileOption = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
