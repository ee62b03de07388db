"""epic-rag for LlamaIndex: an LLM that links compiled nodes, and what keeps them in step with an index.

>>> from llama_index_epic import EpicLLM, EpicVectorStore                     # doctest: +SKIP
>>> llm = EpicLLM(model="smollm2", store="handbook.kv")                       # doctest: +SKIP
>>> vectors = EpicVectorStore(SimpleVectorStore(), llm=llm)                   # doctest: +SKIP
"""

from llama_index_epic.ingestion import EpicCompile
from llama_index_epic.llm import EpicLLM, use_tokenizer
from llama_index_epic.nodes import compile_nodes, reconcile
from llama_index_epic.synthesizer import (
    EpicCondensePlusContextChatEngine,
    EpicContextChatEngine,
    EpicSynthesizer,
)
from llama_index_epic.vector_store import EpicVectorStore

__all__ = [
    "EpicCompile",
    "EpicCondensePlusContextChatEngine",
    "EpicContextChatEngine",
    "EpicLLM",
    "EpicSynthesizer",
    "EpicVectorStore",
    "compile_nodes",
    "reconcile",
    "use_tokenizer",
]
