"""Models that cannot be served exactly are refused at load, each for its reason; the gate refuses wrong numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from epic_engine import Engine, SelfTestError, UnsupportedModelError
from epic_engine.attention.base import Run
from epic_engine.attention.torch_backend import TorchPlan
from epic_engine.linking import layout
from epic_engine.model import decoder as decoder_module
from epic_engine.model import selftest
from epic_engine.model.rope import RotaryTable
from torch import nn

from tests.engine.models import build, tiny
from tests.engine.oracle import plain_logits, untouched

_SMALL: dict[str, Any] = {"vocab_size": 199, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_GPT2_LIKE = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
_FALCON = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]}

# family, changes to the configuration, whether those of tests.engine.models are the base, reason
REFUSED: list[tuple[str, dict[str, Any], bool, str]] = [
    ("GPT2LMHead", _GPT2_LIKE, False, "0 rotary embedding modules.*learned positions"),
    ("GPTJ", {**_GPT2_LIKE, "rotary_dim": 8}, False, "rotary function takes|does not take a custom attention"),
    ("Bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}, False, "does not take a custom attention function"),
    ("Falcon", {**_FALCON, "alibi": True}, False, "ALiBi"),
    ("Mpt", {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, False, "ALiBi"),
    ("Mamba", {"hidden_size": 48, "num_hidden_layers": 2}, False, "carry state that is not KV"),
    (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
        True,
        "hybrid carry state that is not KV",
    ),
    ("Bamba", _BAMBA, True, "carry state that is not KV"),
    ("DeepseekV2", _MLA, True, "MLA"),
    ("DeepseekV3", _MLA, True, "MLA"),
    ("Gemma2", {"head_dim": 8, "sliding_window": 512}, True, "soft-capping"),
    (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 512},
        True,
        "attention-sink logits",
    ),
    ("StableLm", {}, True, "does not take a custom attention function|does not forward keyword arguments"),
    ("Mistral", {"sliding_window": 16}, True, r"max_model_len=512.*window of 16 tokens. Pass max_model_len=16"),
]


@pytest.mark.parametrize(("family", "changes", "shared", "reason"), REFUSED, ids=[r[0] for r in REFUSED])
def test_a_model_is_refused_for_its_reason(family: str, changes: dict[str, Any], shared: bool, reason: str) -> None:
    if shared:
        model = build(family, changes)
    else:
        config = getattr(hf, f"{family.removesuffix('LMHead')}Config")(**_SMALL, **changes)
        model = getattr(hf, f"{family}Model" if family.endswith("LMHead") else f"{family}ForCausalLM")(config)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        Engine(model, selftest=False)  # by looking at it, not because numbers differ
    assert type(model).__name__ in str(caught.value) or "Attention" in str(caught.value)


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(d_model=48, d_ff=64, num_layers=2, num_heads=4, d_kv=12, vocab_size=199)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine(hf.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("length", [16, 9])
def test_a_window_that_no_context_exceeds_is_served(length: int) -> None:
    model = build("Mistral", {"sliding_window": 16})
    ids = list(range(20, 20 + length))
    with Engine(model, max_model_len=length) as engine:
        got = engine.score([engine.compile(ids[:3]), ids[3:5]], ids[5:], policy="full")
    want = plain_logits(untouched(model), ids)[4:-1]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("mark", ["_hf_peft_config_loaded", "peft_config"])
def test_an_unmerged_adapter_is_refused(mark: str) -> None:
    model = copy.deepcopy(tiny("llama"))
    setattr(model, mark, True)
    with pytest.raises(UnsupportedModelError, match=r"unmerged adapter\. Merge it first"):
        Engine(model)


def test_a_wrapped_model_is_refused() -> None:
    class PeftModelForCausalLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = tiny("llama")

    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        Engine(PeftModelForCausalLM())


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(tiny("llama").config)
    with pytest.raises(UnsupportedModelError, match="meta"):
        Engine(model)


# -- the gate --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPIC_RAG_CACHE", str(tmp_path))
    return tmp_path


def _turned(table: RotaryTable) -> RotaryTable:
    return RotaryTable(torch.polar(table.factors.abs(), table.factors.angle() * 1.01))


def _corrupt(what: str, patch: pytest.MonkeyPatch) -> None:
    if what == "rotation":
        build_table = decoder_module.build_table
        patch.setattr(decoder_module, "build_table", lambda *a, **k: _turned(build_table(*a, **k)))
    elif what == "scaling":
        attend = TorchPlan.attend
        patch.setattr(TorchPlan, "attend", lambda self, la, q, k, v, s, o: attend(self, la, q, k, v, s * 1.02, o))
    elif what == "offset":  # right as long as nothing is linked
        patch.setattr(layout, "Run", lambda kv, a, b, at, after, *c: Run(kv, a, b, max(at - 1, 0), after, *c))
    elif what == "reader":  # rows see a run that lies behind them
        patch.setattr(layout, "Run", lambda kv, a, b, at, after, *c: Run(kv, a, b, at, max(after - b, at), *c))
    else:  # not a number is not small
        attend = TorchPlan.attend
        patch.setattr(TorchPlan, "attend", lambda self, *a: attend(self, *a) * float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["rotation", "scaling", "offset", "reader", "nan"])
def test_wrong_numbers_are_not_served(
    what: str, dtype: torch.dtype, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16 and what in ("rotation", "scaling"):
        pytest.skip("one per cent hides in bfloat16's own rounding")
    with monkeypatch.context() as patch:
        _corrupt(what, patch)
        for _ in range(2):  # a refusal is not remembered as a pass
            with pytest.raises(
                SelfTestError, match=r"LlamaForCausalLM does not pass.*error \S+ .*and \S+ .*allowed \d.*selftest=False"
            ):
                Engine(tiny("llama", dtype))
        with Engine(tiny("llama", dtype), selftest=False) as engine:
            assert engine.selftest is None
    with Engine(tiny("llama", dtype)) as engine:
        assert engine.selftest is not None
        assert engine.selftest.passed


def test_a_pass_is_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = selftest.run_selftest
    monkeypatch.setattr(selftest, "run_selftest", lambda *a: runs.append(1) or real(*a))
    first = Engine(tiny("llama")).selftest
    second = Engine(build("Llama", {})).selftest
    assert first is not None
    assert second is not None
    assert len(runs) == 1
    assert (first.cached, second.cached) == (False, True)
    assert first.full_error == second.full_error <= first.tolerance < 1e-3
    Engine(tiny("qwen2"))
    Engine(tiny("llama"), max_model_len=50)
    assert len(runs) == 3
    for content in ("{", '{"full_error": 9.0, "linked_error": 0.0, "tolerance": 1.0, "noise": 0.0}'):
        for file in (cache / "selftest").iterdir():
            file.write_text(content)
        assert Engine(tiny("llama")).selftest.cached is False  # type: ignore[union-attr]
    assert len(runs) == 5


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("EPIC_RAG_CACHE", str(tmp_path / "file"))
    with Engine(tiny("llama")) as engine:
        assert engine.selftest is not None
        assert not engine.selftest.cached
