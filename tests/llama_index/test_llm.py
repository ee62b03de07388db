"""The LLM by itself: both doors and their eight methods, options, usage, copies, life."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from epic_engine import ConfigError, ContextLengthError, EngineClosedError, SamplingParams
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms.loading import load_llm
from llama_index_epic import EpicLLM, use_tokenizer
from llama_index_epic.responses import plain_messages

from epic_rag.errors import RagError
from epic_rag.texts import TextItem
from tests.llama_index.stack import ScriptedLLM, expected, recorded, tiny_llm
from tests.rag.stack import TEXTS, model, save_model, tokenizer

PROMPT = f"Context:\n{TEXTS['ferry']}\n\nWhen does it leave?"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=PROMPT)]
FERRY = [TEXTS["ferry"].strip()]


@pytest.fixture(scope="module")
def llm() -> Iterator[EpicLLM]:
    with tiny_llm() as made:
        made.texts.add([TextItem(name, text) for name, text in TEXTS.items()])
        yield made


def answer(llm: EpicLLM, messages: list[ChatMessage], **options: str) -> str:
    return expected(llm.engine, messages, FERRY, **options)[0]


async def test_eight_methods_one_answer_and_one_pair_of_events_each(llm: EpicLLM) -> None:
    user = [ChatMessage(content=PROMPT)]
    formatted = tokenizer().apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    want = answer(llm, user)
    with recorded() as calls:
        texts = [
            llm.chat(user).message.content,
            llm.complete(PROMPT).text,
            llm.complete(formatted, formatted=True).text,
            (await llm.achat(user)).message.content,
            (await llm.acomplete(PROMPT)).text,
            (await llm.acomplete(formatted, formatted=True)).text,
        ]
        grown = [
            [(r.delta, r.message.content, r.raw) for r in llm.stream_chat(user)],
            [(r.delta, r.text, r.raw) for r in llm.stream_complete(PROMPT)],
            [(r.delta, r.message.content, r.raw) async for r in await llm.astream_chat(user)],
            [(r.delta, r.text, r.raw) async for r in await llm.astream_complete(formatted, formatted=True)],
        ]
    assert texts == [want] * 6
    for responses in grown:
        assert "".join(delta for delta, _, _ in responses) == want
        for (_, before, _), (delta, text, _) in pairwise(responses):
            assert text == before + delta
        assert [raw is not None for _, _, raw in responses] == [False] * (len(responses) - 1) + [True]
    assert calls.names == [
        *["LLMChatStartEvent", "LLMChatEndEvent"],
        *["LLMCompletionStartEvent", "LLMCompletionEndEvent"] * 2,
        *["LLMChatStartEvent", "LLMChatEndEvent"],
        *["LLMCompletionStartEvent", "LLMCompletionEndEvent"] * 2,
        *["LLMChatStartEvent", "LLMChatEndEvent", "LLMCompletionStartEvent", "LLMCompletionEndEvent"] * 2,
    ]


def test_usage(llm: EpicLLM) -> None:
    response = llm.chat(MESSAGES)
    done = llm.engine.generate([[5], llm.texts.key_of("ferry"), [5]], SamplingParams(max_tokens=1), policy="legolink:4")
    usage = response.raw["usage"]
    rendered = tokenizer().apply_chat_template(
        [{"role": m.role.value, "content": m.content} for m in MESSAGES], tokenize=False, add_generation_prompt=True
    )
    assert usage["prompt_tokens"] == sum(
        len(tokenizer()(part, add_special_tokens=False)["input_ids"]) for part in (*rendered.split(FERRY[0]), FERRY[0])
    )
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["linked_tokens"] == done.stats.linked
    assert usage["recomputed_tokens"] == done.stats.recomputed
    assert usage["reused_tokens"] == done.stats.linked - done.stats.recomputed
    assert response.raw["epic"]["policy"] == "legolink:4"
    assert 0 < response.raw["epic"]["ttft_s"] <= response.raw["epic"]["total_s"]
    assert response.additional_kwargs == {k: usage[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}


def test_llama_indexs_own_counter_reads_the_usage() -> None:
    counter = TokenCountingHandler()
    with tiny_llm(callback_manager=CallbackManager([counter])) as llm:
        counts = [llm.chat(MESSAGES).raw["usage"], llm.complete(PROMPT).raw["usage"]]
        last = list(llm.stream_chat(MESSAGES))[-1].raw["usage"]
    assert counter.total_llm_token_count == sum(u["total_tokens"] for u in (*counts, last))
    assert len(counter.llm_token_counts) == 3


def test_options_of_one_call(llm: EpicLLM) -> None:
    assert llm.chat(MESSAGES, max_tokens=3).raw["usage"]["completion_tokens"] == 3
    full = llm.chat(MESSAGES, policy="full")
    assert full.message.content == answer(llm, MESSAGES, policy="full")
    assert full.raw["usage"]["reused_tokens"] == 0
    assert full.raw["epic"]["reuse"] == "none"
    hot = [llm.complete(PROMPT, temperature=5.0, seed=seed).text for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    whole = llm.complete(PROMPT).text
    stop = whole[2:4]
    stopped = llm.complete(PROMPT, stop=[stop])
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.raw["epic"]["finish_reason"] == "stop"
    assert "".join(r.delta for r in llm.stream_complete(PROMPT, stop=stop)) == stopped.text


async def test_what_cannot_work_is_refused_at_once(llm: EpicLLM) -> None:
    with pytest.raises(ConfigError, match=r"take no top_n: use .*top_p"):
        llm.chat(MESSAGES, top_n=1)
    with pytest.raises(ConfigError, match="take no top_n"):
        await llm.astream_chat(MESSAGES, top_n=1)
    with pytest.raises(ConfigError, match="temperature=-1"):
        llm.stream_complete(PROMPT, temperature=-1)
    with pytest.raises(ConfigError, match="policy"):
        llm.chat(MESSAGES, policy="magic")
    with pytest.raises(ContextLengthError, match=r"the prompt has \d+ tokens and 8 more .* max_model_len=2048"):
        llm.complete("word " * 2000)
    with pytest.raises(ContextLengthError, match="2048"):
        await llm.acomplete("word " * 2000)
    with pytest.raises(RagError, match="ImageBlock"):
        llm.chat([ChatMessage(blocks=[TextBlock(text="a"), ImageBlock(image=b"x")])])
    with pytest.raises(RagError, match="ReActAgent"):
        llm.chat([ChatMessage(role="tool", content="42")])
    with pytest.raises(RagError, match="user"):
        llm.chat([ChatMessage(role="assistant", content="Hm.")])
    with pytest.raises(ConfigError, match=r"knows no modle: use .*model"):
        EpicLLM(modle="smollm2")
    with pytest.raises(ConfigError, match="max_tokens=0"):
        EpicLLM(max_tokens=0)
    with pytest.raises(ConfigError, match="policy"):
        EpicLLM(policy="magic")


def test_short_texts_are_linked_by_their_ids_only() -> None:
    with tiny_llm() as llm:
        llm.texts.add([TextItem("yes", "Aye."), TextItem("no", "Nay.")])
        prompt = "Votes: Nay. Aye. Nay. How many?"
        assert llm.complete(prompt).raw["usage"]["linked_tokens"] == 0
        linked = llm.complete(prompt, text_ids=["no", "yes", "no", "unknown"]).raw["usage"]["linked_tokens"]
        assert linked == 3 * len(tokenizer()("Aye.")["input_ids"])
        assert llm.complete(prompt, text_ids=["yes", "no"]).raw["usage"]["linked_tokens"] == linked * 2 // 3


async def test_the_loop_goes_on_while_answers_come(llm: EpicLLM) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    items = 0

    async def stream() -> str:
        nonlocal items
        text = ""
        async for response in await llm.astream_chat(MESSAGES, max_tokens=60):
            text = response.message.content or ""
            items += 1
        return text

    texts = await asyncio.gather(stream(), stream())
    seen = ticks
    ticking.cancel()
    assert texts[0] == texts[1] == llm.chat(MESSAGES, max_tokens=60).message.content
    assert seen > items > 2  # at least a tick an item: nothing held the loop


async def test_a_cold_model_is_loaded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = EpicLLM._acquire

    def opened(self: EpicLLM) -> object:
        threads.append(threading.current_thread())
        return real(self)

    monkeypatch.setattr(EpicLLM, "_acquire", opened)
    with tiny_llm() as cold:
        assert (await cold.achat(MESSAGES)).message.content
    with tiny_llm() as cold:
        assert [r async for r in await cold.astream_complete(PROMPT)]
    assert threads
    assert threading.main_thread() not in threads


async def test_cancelling_frees_the_engine(llm: EpicLLM) -> None:
    async with aclosing(await llm.astream_chat(MESSAGES, max_tokens=1500)) as responses:
        async for _ in responses:
            break
    task = asyncio.ensure_future(llm.achat(MESSAGES, max_tokens=1500))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stream = llm.stream_chat(MESSAGES, max_tokens=1500)
    next(stream)
    stream.close()
    assert llm.chat(MESSAGES).message.content == answer(llm, MESSAGES)


def test_structured_predict_parses_what_the_model_writes() -> None:
    class Boat(BaseModel):
        name: str
        seats: int

    with recorded() as calls, tiny_llm(kind=ScriptedLLM, script={"Name a boat": '{"name": "Ines", "seats": 6}'}) as llm:
        boat = llm.structured_predict(Boat, PromptTemplate("Name a boat of {place}."), place="the harbour")
    assert boat == Boat(name="Ines", seats=6)
    ((messages,),) = calls.started
    assert messages.content.startswith("Name a boat of the harbour.")
    assert '"seats"' in messages.content


def test_llama_indexs_own_hugging_face_llm_runs_on_the_engines_model(llm: EpicLLM) -> None:
    stock = pytest.importorskip("llama_index.llms.huggingface")
    assert llm.chat(MESSAGES).raw["epic"]["reuse"] == "composed"
    reference, fresh = llm.engine.decoder.reference, model.__wrapped__()
    with torch.inference_mode():
        row = torch.tensor([list(range(40))])
        assert torch.equal(reference(row).logits, fresh(row).logits)  # as if there were no engine
    other = stock.HuggingFaceLLM(
        model=reference, tokenizer=llm.engine.tokenizer, is_chat_model=True, max_new_tokens=8,
        generate_kwargs={"do_sample": False},
    )  # fmt: skip
    plain = [ChatMessage(content="Who is the harbour master?")]
    assert llm.chat(plain).raw["epic"]["reuse"] == "none"  # with nothing to cut out, both have the same token ids
    whole = other.chat(plain).raw["model_output"][0].tolist()
    prompt = tokenizer()(other.messages_to_prompt(plain), add_special_tokens=False)["input_ids"]
    assert [prompt] == [list(part) for part in llm.texts.composer.segments(plain_messages(plain), llm.texts.find)]
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt) :] == list(llm.engine.generate([prompt], SamplingParams(max_tokens=8)).token_ids)


def test_system_prompt(llm: EpicLLM) -> None:
    with tiny_llm(system_prompt="Be brief.") as brief:
        brief.texts.add([TextItem("ferry", TEXTS["ferry"])])
        template = PromptTemplate("Context:\n{text}\n\nWhen does it leave?")
        assert brief.predict(template, text=TEXTS["ferry"]) == answer(llm, MESSAGES)


def test_a_saved_model_copies_pickles_and_serialisation(tmp_path: Path) -> None:
    options = {"selftest": False}
    folder = save_model(tmp_path / "model")
    with EpicLLM(
        model=folder, store=tmp_path / "store", context="isolated", policy="legolink:4", max_tokens=8, stop="Q:",
        context_window=1024, engine_options=options,
    ) as llm:  # fmt: skip
        assert llm.metadata.context_window == 1024
        assert not llm._engine.taken  # nothing was loaded for it
        state = llm.to_dict()
        assert EpicLLM.from_dict(state).to_dict() == state == load_llm_from(state).to_dict()
        assert "callback_manager" not in state
        llm.texts.add([TextItem("ferry", TEXTS["ferry"])])
        want = llm.chat(MESSAGES)
        assert want.raw["epic"]["reuse"] == "composed"
        data = pickle.dumps(llm)
        assert len(data) < 10_000
        for other in (pickle.loads(data), copy.copy(llm), copy.deepcopy(llm), llm.model_copy()):  # noqa: S301
            assert other.to_dict() == state
            assert other.engine is llm.engine
            assert other.chat(MESSAGES).message.content == want.message.content
            other.close()
        assert llm.chat(MESSAGES).message.content == want.message.content
        engine = llm.engine
    with pytest.raises(EngineClosedError):
        engine.compile([1, 2])
    assert llm.chat(MESSAGES).raw["epic"]["reuse"] == "composed"  # opened again, from disk
    llm.close()
    llm.close()


def load_llm_from(state: dict[str, object]) -> EpicLLM:
    """As LlamaIndex's loader would, which knows the classes of its core only."""
    with pytest.raises(ValueError, match="EpicLLM"):
        load_llm(dict(state))
    return EpicLLM(**{k: v for k, v in state.items() if k != "class_name"})


def test_a_loaded_model_is_never_pickled() -> None:
    with tiny_llm() as llm, pytest.raises(ConfigError, match="folder"):
        pickle.dumps(llm.warm_up())


def test_llms_of_one_model_share_an_engine() -> None:
    with tiny_llm() as one, tiny_llm(temperature=0.7, max_tokens=3) as two, tiny_llm(namespace="b") as other:
        assert one.engine is two.engine
        assert one.texts is two.texts
        assert one.engine is not other.engine
        one.close()
        assert two.complete("Hello").raw["usage"]["prompt_tokens"] > 0


def test_tokens_are_counted_with_the_models_tokenizer_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_index.core

    monkeypatch.setattr(Settings, "_tokenizer", None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    with tiny_llm() as llm:
        assert llm.metadata.context_window == model().config.max_position_embeddings
        assert Settings.tokenizer("naïve") != tokenizer()("naïve")["input_ids"]
        use_tokenizer(llm)
    assert Settings.tokenizer("naïve") == tokenizer()("naïve")["input_ids"]


def test_priority_reaches_the_engine(llm: EpicLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    begin = llm.engine.streams

    def stream(*arguments: Any, **options: Any) -> Any:
        asked.append(options["priority"])
        return begin(*arguments, **options)

    monkeypatch.setattr(llm.engine, "streams", stream)
    llm.chat(MESSAGES, priority=2)
    llm.complete(PROMPT, formatted=True, priority=1)
    llm.complete(PROMPT)
    assert asked == [2, 1, 0]
