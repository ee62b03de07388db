"""LangChain with MiniLM, FAISS and epic-rag: an index, questions, and the time to the first token.

Run: python examples/langchain_rag.py [STORE]
Needs: pip install "epic-rag[demo,langchain]" langchain-community
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_epic import ChatEpic, EpicVectorStore, create_epic_documents_chain
from langchain_text_splitters import RecursiveCharacterTextSplitter

from epic_rag.retrieval import MiniLMEmbedder

QUESTIONS = {
    "In which year was the workshop founded?": "1987",
    "What is the shop cat called?": "Spoke",
    "How much does a full service cost?": "85 euros",
    "What does mending a flat tyre cost?": "12 euros",
    "How long is the island route?": "47 kilometres",
    "How long is every repair guaranteed?": "six months",
}
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer in one short sentence from these documents:\n\n{context}"), ("human", "{question}")]
)


class MiniLM(Embeddings):
    def __init__(self) -> None:
        self._embedder = MiniLMEmbedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class LastAnswer(BaseCallbackHandler):
    """Keeps the model's last prompt and message: what a chain does not hand on."""

    def on_chat_model_start(self, serialized, messages, **_):
        self.prompt = messages[0]

    def on_llm_end(self, response, **_):
        self.message = response.generations[0][0].message


store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="epic-rag-")
with ChatEpic(model="smollm2", store=store, max_tokens=48) as llm:
    # Short chunks: a 135M model does not find a fact in long ones.
    splitter = RecursiveCharacterTextSplitter(chunk_size=450, chunk_overlap=0)
    files = sorted((Path(__file__).parent / "corpus").glob("*.md"))
    chunks = splitter.split_documents([Document(f.read_text(), metadata={"source": f.name}) for f in files])
    ids = [f"{chunk.metadata['source']}#{number}" for number, chunk in enumerate(chunks)]
    index = EpicVectorStore.from_documents(chunks, MiniLM(), ids=ids, llm=llm)  # in FAISS, and compiled
    index.reconcile()  # forgets the chunks of an earlier run on this store
    print(f"{len(llm.texts.ids())} chunks compiled")

    retriever = index.as_retriever(search_kwargs={"k": 4})
    chain = {"context": retriever, "question": RunnablePassthrough()} | create_epic_documents_chain(llm, PROMPT)
    for question, fact in QUESTIONS.items():
        seen = LastAnswer()
        answer = chain.invoke(question, config={"callbacks": [seen]})
        usage, meta = seen.message.usage_metadata, seen.message.response_metadata["epic"]

        def first_token(policy: str | None, prompt=seen.prompt) -> float:
            options = {"policy": policy, "max_tokens": 1}
            return median(llm.invoke(prompt, **options).response_metadata["epic"]["ttft_s"] for _ in range(3))

        linked, full = first_token(None), first_token("full")
        print(f"\n{'✓' if fact in answer else '✗'} {question}\n  {answer}")
        print(
            f"  {usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused "
            f"({meta['reuse']}); first token after {linked:.2f} s, {full:.2f} s when all is computed: "
            f"{full / linked:.1f} times faster"
        )
