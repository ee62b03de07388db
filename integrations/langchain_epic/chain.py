"""The documents chain: as LangChain's own, but documents keep their ids up to the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from epic_engine import ConfigError
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from langchain_epic.chat_model import ChatEpic
from langchain_epic.documents import text_id
from langchain_epic.messages import document_block

__all__ = ["create_epic_documents_chain"]

Blocks = list[str | dict[str, Any]]


def create_epic_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain that puts documents into a prompt and links them by their ids.

    Takes the place of LangChain's ``create_stuff_documents_chain`` and makes the same prompts. Documents that were
    never compiled are compiled when they are first asked about; those without an id get one from their text. With a
    model other than :class:`ChatEpic` it does what LangChain's chain does.

    Parameters
    ----------
    llm
        A :class:`ChatEpic`, also with tools or options bound.
    prompt
        Has the variable ``document_variable_name``.
    output_parser
        What follows the model; the answer's text by default.
    document_prompt
        Formats one document from ``page_content`` and its metadata; by default its ``page_content`` alone.
    document_separator
        Stands between documents.
    document_variable_name
        Key of the documents in the chain's input.

    Returns
    -------
    Runnable
        From a mapping with a list of documents and the prompt's other variables.

    Raises
    ------
    ConfigError
        If the prompt has no such variable.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigError(
            f"the prompt has no variable {document_variable_name!r}, only {', '.join(prompt.input_variables)}: put "
            f"{{{document_variable_name}}} where the documents belong, or name the one with document_variable_name=…."
        )
    frame = document_prompt or PromptTemplate.from_template("{page_content}")
    links = _is_epic(llm)

    def documents_of(inputs: Mapping[str, Any]) -> Sequence[Document]:
        found: Sequence[Document] = inputs[document_variable_name]
        if isinstance(found, str) or not all(isinstance(d, Document) for d in found):
            raise ConfigError(
                f"{document_variable_name!r} holds a {type(found).__name__}: pass a list of Document objects."
            )
        return found

    def fill(inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        documents = documents_of(inputs)
        if not links:
            text = document_separator.join(format_document(d, frame) for d in documents)
            return prompt.invoke({**inputs, document_variable_name: text}, config)
        slot = uuid4().hex
        value = prompt.invoke({**inputs, document_variable_name: slot}, config)
        blocks = _blocks(documents, frame, document_separator)
        return ChatPromptValue(messages=[_filled(m, slot, blocks) for m in _messages(value)])

    async def afill(inputs: dict[str, Any], config: RunnableConfig) -> PromptValue:
        return fill(inputs, config)

    filled: Runnable[dict[str, Any], PromptValue] = RunnableLambda(fill, afill, name="fill_prompt")
    return (filled | llm | (output_parser or StrOutputParser())).with_config(run_name="epic_documents_chain")


def _is_epic(llm: Any) -> bool:
    while not isinstance(llm, ChatEpic):
        if not hasattr(llm, "bound"):
            return False
        llm = llm.bound
    return True


def _messages(value: PromptValue) -> Sequence[BaseMessage]:
    return [HumanMessage(value.text)] if isinstance(value, StringPromptValue) else value.to_messages()


def _blocks(documents: Sequence[Document], frame: BasePromptTemplate[Any], separator: str) -> Blocks:
    """Documents as they stand in the prompt, each one's own text as a block with its id."""
    blocks: Blocks = []
    for number, document in enumerate(documents):
        shown, own = format_document(document, frame), document.page_content.strip()
        before, found, behind = shown.partition(own) if own else (shown, "", "")
        blocks.append((separator if number else "") + before)
        if found:
            blocks.append(document_block(text_id(document), own, inline=True))
        blocks.append(behind)
    return blocks


def _filled(message: BaseMessage, slot: str, blocks: Blocks) -> BaseMessage:
    """A message with documents in the slot's place; one without the slot stays as it is."""
    content: Blocks = [message.content] if isinstance(message.content, str) else list(message.content)
    filled: Blocks = []
    for block in content:
        text = block if isinstance(block, str) else block.get("text", "") if block.get("type") == "text" else ""
        pieces = text.split(slot)
        if len(pieces) == 1:
            filled.append(block)
            continue
        for number, piece in enumerate(pieces):
            filled += [*(blocks if number else ()), piece]
    if filled == content:
        return message
    made = [{"type": "text", "text": b} if isinstance(b, str) else b for b in filled if b]
    return message.model_copy(update={"content": made})
