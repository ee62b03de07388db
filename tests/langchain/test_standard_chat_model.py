"""LangChain's own suites for chat models, on SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_epic import ChatEpic, document_block
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from epic_rag.engines import close_all

PARAMS: dict[str, Any] = {"model": "smollm2", "max_tokens": 48, "engine_options": {"selftest": False}}
WISDOM = "SmolLM2-135M {}; the mechanism is tested in test_tools.py"


@pytest.fixture(scope="module", autouse=True)
def _one_engine() -> Iterator[None]:
    with ChatEpic(**PARAMS).warm_up():
        yield
    close_all()  # the suites leave their objects open


class TestUnit(ChatModelUnitTests):
    """Construction, standard parameters, serialisation."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatEpic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2"}

    @pytest.mark.xfail(
        strict=True,
        reason="allowed_objects='all' is a list of LangChain's own packages; test_chat_model.py loads with [ChatEpic]",
    )
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


@pytest.mark.smollm2
class TestIntegration(ChatModelIntegrationTests):
    """Every test that our features justify."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatEpic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PARAMS

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"repetition_penalty": 1.15}  # or one joke is told until the tokens are used up

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one object runs one model

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatEpic(**PARAMS, context="isolated", policy="legolink:4")
        text = "The ferry leaves at noon and at dusk. It carries forty people and six bicycles."
        messages = [SystemMessage(["Facts:", document_block("ferry", text)]), HumanMessage("When does it leave?")]
        if not stream:
            return llm.invoke(messages)
        full: Any = None
        for chunk in llm.stream(messages):
            full = chunk if full is None else full + chunk
        return full

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    @pytest.mark.xfail(strict=True, reason=WISDOM.format("does not call a tool of its own accord"))
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(strict=True, reason=WISDOM.format("describes its customer until the tokens are used up"))
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **_: Any) -> None:
        super().test_unicode_tool_call_integration(model)
