"""``epic-rag serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epic_rag.errors import MissingDependencyError

__all__ = ["serve_command"]

_KEYS = "TOML file of keys and namespaces; without it nobody is asked for a key."


def serve_command(
    store: Annotated[Path | None, typer.Option("--store", help="Directory of documents and compiled chunks.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Folder, hub id, .gguf file or 'smollm2' (the default).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at. Default: 8000.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help=_KEYS)] = None,
    policy: Annotated[str | None, typer.Option(help="Link policy of requests that name none.")] = None,
    context: Annotated[str | None, typer.Option(help="Compile context.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="What chunks are kept as: auto, bf16, int8 or fp8.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for KV in memory, such as 8GiB.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings and more.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve an OpenAI-compatible API and a web console. Flags go before the environment, that before the file."""
    try:
        from epic_rag.server.logs import configure_logs
        from epic_rag.server.run import serve
        from epic_rag.server.settings import load_settings
    except ImportError as error:
        raise MissingDependencyError(
            f"the gateway needs {error.name}, which is not installed: pip install 'epic-rag[serve]'"
        ) from error

    flags = {
        "store": store,
        "model": model,
        "host": host,
        "port": port,
        "api_key_file": api_key_file,
        "policy": policy,
        "context": context,
        "device": device,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "memory": memory,
        "log_level": log_level,
    }
    settings = load_settings(flags, config)
    configure_logs(settings.log_level, texts=settings.log_texts)
    if not serve(settings):
        raise typer.Exit(1)
