"""From what the user names to a Hugging Face model and tokenizer on a device."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from epic_engine.errors import ConfigError, InsufficientResourcesError, ModelLoadError, UnsupportedModelError
from epic_engine.memory.budget import available_memory

from .gguf import check_complete, load_gguf, smollm2_file
from .quiet import quiet

__all__ = ["load_model", "pick_device", "pick_dtype"]

logger = logging.getLogger(__name__)


def pick_device(name: str) -> torch.device:
    """Resolve ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises
    ------
    ConfigError
        If CUDA is asked for and absent.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: this torch sees no CUDA device. Use device='cpu' or 'auto'.")
    return torch.device(name)


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX512-BF16 or AMX."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype's name; ``"auto"`` depends on the device (see :class:`~epic_engine.config.EngineConfig`)."""
    if name == "auto":
        fast = device.type == "cuda" or _cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return getattr(torch, name)


def load_model(
    model: Any, *, tokenizer: Any = None, device: str = "auto", dtype: str = "auto"
) -> tuple[Any, Any, torch.device]:
    """Load a causal language model.

    Parameters
    ----------
    model
        A folder, a hub id, a ``.gguf`` file, the alias ``"smollm2"``, or a loaded Hugging Face model.
    tokenizer
        Tokenizer of a loaded model; for the others it overrides the one found.
    device, dtype
        As in :class:`~epic_engine.config.EngineConfig`. A loaded model keeps its own.

    Returns
    -------
    tuple
        Model, tokenizer (None if a loaded model came without) and device.

    Raises
    ------
    ModelLoadError
        If it is not found or cannot be read.
    InsufficientResourcesError
        If its weights would not fit the memory.
    """
    if isinstance(model, torch.nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise UnsupportedModelError(
                f"{type(model).__name__} is no transformers PreTrainedModel. Pass the base model (PEFT: "
                "merge_and_unload()), a folder, a hub id or a .gguf file."
            )
        at = next(model.parameters()).device
        if at.type not in ("cpu", "cuda"):
            raise UnsupportedModelError(
                f"the model is on {at}: only CPU and CUDA are supported; move it with .to('cpu')."
            )
        if device not in ("auto", str(at), at.type):
            raise ConfigError(f"device={device!r} but the loaded model is on {at}: move it, or leave device='auto'.")
        have = str(next(model.parameters()).dtype).removeprefix("torch.")
        if dtype not in ("auto", have):
            raise ConfigError(f"dtype={dtype!r} but the loaded model is {have}: convert it, or leave dtype='auto'.")
        return model, tokenizer, at
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a path, a hub id or a transformers model, not {type(model).__name__}.")
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name == "smollm2":
        path = smollm2_file()
    with quiet():
        if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").is_file()):
            file = path if path.suffix == ".gguf" else _only_gguf(path)
            _check_memory(4 * file.stat().st_size if file.is_file() else 0, place)
            loaded, found = load_gguf(file, kind)
        else:
            loaded, found = _from_pretrained(name if not path.exists() else str(path), kind, place)
    loaded = loaded.to(place)
    return loaded, tokenizer or found, place


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise ModelLoadError(
        f"the folder {folder} has no config.json and {len(files)} .gguf files: give a Hugging Face model folder or "
        "the path of one .gguf file."
    )


def _check_memory(need: int, device: torch.device) -> None:
    have = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if need > have:
        raise InsufficientResourcesError(
            f"the weights need about {need / 2**30:.1f} GiB, {have / 2**30:.1f} GiB are free on {device}: use a "
            "smaller model or dtype='bfloat16'."
        )


def _check_layers(config: Any, folder: Path) -> None:
    """Refuse more layers than there are tensors, before any is made."""
    tensors = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            tensors += len(weights.keys())
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > tensors:
        raise ModelLoadError(
            f"config.json in {folder} names {layers} layers, but the weights hold {tensors} tensors: fetch both again."
        )


def _from_pretrained(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    local = Path(name).is_dir()
    looks_like_path = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    if not local and looks_like_path:
        raise ModelLoadError(f"the model folder {name} does not exist.")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{name} is an encoder-decoder: only decoders are supported.")
        if local:
            size = sum(f.stat().st_size for f in Path(name).glob("*.safetensors"))
            if not size:
                raise ModelLoadError(
                    f"the folder {name} has no .safetensors weights; other formats (pickle) are not loaded. Convert "
                    "them with save_pretrained()."
                )
            _check_memory(size, device)
            _check_layers(config, Path(name))
        # Never pickled weights, never code from the model's repository (by default transformers asks on a terminal).
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        check_complete(name, found)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (ModelLoadError, InsufficientResourcesError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"the model {name!r} could not be loaded: {error}\nGive a folder with config.json and .safetensors, a hub "
            "id that this machine can reach or has cached, a .gguf file, or 'smollm2'."
        ) from error
    return model, tokenizer
