"""epic-rag for LangChain: a chat model that links compiled documents, and what keeps them in step with an index.

>>> from langchain_epic import ChatEpic, EpicVectorStore                      # doctest: +SKIP
>>> llm = ChatEpic(model="smollm2", store="handbook.kv")                      # doctest: +SKIP
>>> index = EpicVectorStore.from_documents(chunks, embeddings, llm=llm)       # doctest: +SKIP
"""

from langchain_epic.chain import create_epic_documents_chain
from langchain_epic.chat_model import ChatEpic
from langchain_epic.documents import compile_documents, reconcile, text_id
from langchain_epic.messages import document_block
from langchain_epic.vector_store import EpicVectorStore

__all__ = [
    "ChatEpic",
    "EpicVectorStore",
    "compile_documents",
    "create_epic_documents_chain",
    "document_block",
    "reconcile",
    "text_id",
]
