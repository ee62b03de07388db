"""LlamaIndex with MiniLM, FAISS and epic-rag: an index, questions, and the time to the first token.

Run: python examples/llama_index_rag.py [STORE]
Needs: pip install "epic-rag[demo,llama-index]" llama-index-vector-stores-faiss llama-index-llms-huggingface
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import faiss
import llama_index.core.instrumentation as instrument
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.vector_stores.faiss import FaissMapVectorStore
from llama_index_epic import EpicLLM, EpicVectorStore, use_tokenizer

from epic_rag.retrieval import MiniLMEmbedder

try:
    from llama_index.llms.huggingface import HuggingFaceLLM
except ImportError:
    HuggingFaceLLM = None

EMBEDDER = MiniLMEmbedder()
QUESTIONS = {
    "In which year was the workshop founded?": "1987",
    "What is the shop cat called?": "Spoke",
    "Who teaches the evening course?": "Priya Raman",
    "How much does a full service cost?": "85 euros",
    "How much does it cost to rent a cargo bicycle for a day?": "30 euros",
    "What does mending a flat tyre cost?": "12 euros",
    "How long is the island route?": "47 kilometres",
    "How long is every repair guaranteed?": "six months",
}


class MiniLM(BaseEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return EMBEDDER.embed([text])[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LastChat(BaseEventHandler):
    """Keeps the LLM's last prompt and response: what a query engine does not hand on."""

    last: Any = None

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            self.last = event


chats = LastChat()
instrument.get_dispatcher().add_event_handler(chats)
store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="epic-rag-")

with EpicLLM(model="smollm2", store=store, max_tokens=60) as llm:
    use_tokenizer(llm)
    vectors = EpicVectorStore(FaissMapVectorStore(faiss.IndexIDMap2(faiss.IndexFlatIP(EMBEDDER.dim))), llm)
    corpus = sorted((Path(__file__).parent / "corpus").glob("*.md"))
    index = VectorStoreIndex.from_documents(
        [Document(text=path.read_text(), doc_id=path.name) for path in corpus],
        storage_context=StorageContext.from_defaults(vector_store=vectors),
        # Short nodes: a 135M model does not find a fact in long ones.
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0)],
        embed_model=MiniLM(),
    )
    vectors.reconcile(index)  # forgets the nodes of an earlier run on this store
    print(f"{len(llm.texts.ids())} nodes compiled\n")

    engine = index.as_query_engine(llm=llm, similarity_top_k=4)
    right = 0
    for question, fact in QUESTIONS.items():
        answer = str(engine.query(question))
        right += fact in answer
        usage, cost = chats.last.response.raw["usage"], chats.last.response.raw["epic"]
        print(f"{'✓' if fact in answer else '✗'} {question}\n  {answer}")
        print(f"  {usage['reused_tokens']} of {usage['prompt_tokens']} prompt tokens reused ({cost['reuse']})\n")
    print(f"{right} of {len(QUESTIONS)} answers hold the fact that was asked for\n")

    # The same prompt and weights three ways: the engine leaves the model that it was given as it was.
    prompt, model = chats.last.messages, llm.engine.decoder.reference
    ways = {
        "compiled nodes linked": lambda: llm.chat(prompt, max_tokens=1),
        "all of it computed": lambda: llm.chat(prompt, policy="full", max_tokens=1),
    }
    if HuggingFaceLLM:
        stock = HuggingFaceLLM(model=model, tokenizer=llm.engine.tokenizer, is_chat_model=True, max_new_tokens=1)
        ways["LlamaIndex's HuggingFaceLLM"] = lambda: stock.chat(prompt)
    else:
        print("To compare with LlamaIndex's HuggingFaceLLM: pip install llama-index-llms-huggingface")
    print(f"First token of the last answer ({model.dtype}, {model.device}):")
    # Medians of three rounds, after one to warm up.
    rounds = [[timeit(chat, number=1) for chat in ways.values()] for _ in range(4)][1:]
    times = [median(taken) for taken in zip(*rounds, strict=True)]
    for name, time in zip(ways, times, strict=True):
        print(f"  {time:6.2f} s  {time / times[0]:4.1f} x  {name}")
