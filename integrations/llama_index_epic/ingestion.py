"""A step of ingestion pipelines that compiles the nodes that pass through it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from epic_engine import ConfigError
from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent

from llama_index_epic.llm import EpicLLM
from llama_index_epic.nodes import compile_nodes

__all__ = ["EpicCompile"]


class EpicCompile(TransformComponent):
    """Compiles nodes and hands them on unchanged: the last transformation of a pipeline.

    After splitters and extractors, because it compiles what they leave; behind the embedding, if compile contexts
    are to look for similar nodes. It sees no deletes and, where a cache answers for it, no nodes: an
    :class:`~llama_index_epic.EpicVectorStore` sees both. Together they compile once.

    With ``num_workers`` each worker process loads the model and compiles its share into the LLM's store.

    Parameters
    ----------
    llm
        Whose prompts will hold the nodes.
    """

    llm: EpicLLM = Field(description="Compiles the nodes, and finds them in its prompts.")

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "EpicCompile"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compile nodes; returns them."""
        compile_nodes(self.llm, nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As calling it; the event loop goes on."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Not the inherited one, which leaves out what cannot be pickled and fails in the worker.
        if self.llm.store is None:
            raise ConfigError(
                "worker processes cannot compile into this process's memory: give the EpicLLM a store=… directory, or "
                "leave num_workers out."
            )
        return {
            "__dict__": dict(self.__dict__),
            "__pydantic_extra__": None,
            "__pydantic_fields_set__": {"llm"},
            "__pydantic_private__": None,
        }
