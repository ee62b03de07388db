"""Nodes as compiled texts: what of a node is compiled is exactly what stands in prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, MetadataMode

from epic_rag.errors import RagError
from epic_rag.texts import AddReport, Drift, TextItem
from llama_index_epic.llm import EpicLLM

__all__ = ["compile_nodes", "prompted_text", "reconcile"]


def prompted_text(node: BaseNode) -> str:
    """What of a node stands in a prompt: metadata and text as LLMs see them, without white space at the ends."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def _items(nodes: Iterable[BaseNode]) -> list[TextItem]:
    return [TextItem(n.node_id, prompted_text(n), n.ref_doc_id or "", n.embedding) for n in nodes]


def compile_nodes(llm: EpicLLM, nodes: Sequence[BaseNode]) -> AddReport:
    """Compile nodes, or what changed of them; returns when they are durable.

    Parameters
    ----------
    llm
        Compiles, and finds them in its prompts from now on.
    nodes
        As they are indexed: their text and metadata are final. Embeddings, where there are any, tell which nodes
        are near to each other.

    Raises
    ------
    InsufficientResourcesError
        If their KV would not fit; before anything is compiled.
    """
    return llm.texts.add(_items(nodes))


def reconcile(llm: EpicLLM, source: BaseIndex[Any] | Iterable[BaseNode]) -> Drift:
    """Bring the compiled texts in step with an index: compile what is missing, forget what it has no more.

    Parameters
    ----------
    llm
        Whose compiled texts they are. Its store and namespace must serve this index alone: whatever else is
        compiled there is forgotten.
    source
        A vector store index, a summary index, or all the nodes of any index.

    Returns
    -------
    Drift
        What was wrong.

    Raises
    ------
    RagError
        If the index cannot list its nodes.
    """
    return llm.texts.reconcile(_items(_nodes_of(source) if isinstance(source, BaseIndex) else source))


def _nodes_of(index: BaseIndex[Any]) -> Sequence[BaseNode]:
    if isinstance(index, VectorStoreIndex) and index.vector_store.stores_text:
        try:
            return index.vector_store.get_nodes()
        except NotImplementedError:
            raise RagError(
                f"{type(index.vector_store).__name__} cannot list its nodes: call reconcile() with all of them."
            ) from None
    if isinstance(index, VectorStoreIndex):
        return index.docstore.get_nodes(list(index.index_struct.nodes_dict.values()))
    if isinstance(index, SummaryIndex):
        return index.docstore.get_nodes(index.index_struct.nodes)
    raise RagError(f"{type(index).__name__} cannot list its nodes: call reconcile() with all of them.")
