"""FAISS, MiniLM and SmolLM2 in LangChain's retrieval chain, by ids and by discovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_epic import ChatEpic, EpicVectorStore, create_epic_documents_chain

from epic_rag.retrieval import MiniLMEmbedder
from tests.langchain.chats import engines_own
from tests.langchain.test_chain import Recorder

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from these:\n\n{context}"), ("human", "{input}")])
QUESTION = "How long is every repair guaranteed?"


class MiniLM(Embeddings):
    """The embedder of the package, as LangChain wants it."""

    def __init__(self) -> None:
        self._embedder = MiniLMEmbedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.mark.smollm2
def test_retrieval_chain_on_real_models(tmp_path: Path) -> None:
    paragraphs = (CORPUS / "repairs.md").read_text(encoding="utf-8").split("\n\n")
    documents = [Document(p, metadata={"number": n}) for n, p in enumerate(p for p in paragraphs if len(p) > 60)]
    options: dict[str, Any] = {"context": "isolated", "policy": "legolink:4", "max_tokens": 12, "dtype": "float32"}
    with ChatEpic(model="smollm2", store=tmp_path, **options, engine_options={"selftest": False}) as llm:
        index = EpicVectorStore.from_documents(documents, MiniLM(), llm=llm)
        retriever = index.as_retriever(search_kwargs={"k": 3})
        for make in (create_epic_documents_chain, create_stuff_documents_chain):
            seen = Recorder()
            chain = create_retrieval_chain(retriever, make(llm, PROMPT))
            result = chain.invoke({"input": QUESTION}, config={"callbacks": [seen]})
            found = [d.page_content for d in result["context"]]
            assert len(found) == 3
            assert any("six months" in text for text in found)
            context = "\n\n".join(found)
            plain = [{"role": "system", "content": f"Answer from these:\n\n{context}"}]
            plain.append({"role": "user", "content": QUESTION})
            stop_ids = llm.texts.composer.stop_token_ids
            want, length, linked = engines_own(
                *(llm.engine, plain, found),
                policy="legolink:4",
                hf=llm.engine.tokenizer,
                max_tokens=12,
                stop_token_ids=stop_ids,
            )
            message = seen.messages[-1]
            assert result["answer"] == message.content == want
            assert message.response_metadata["epic"]["reuse"] == "composed"
            assert message.usage_metadata["input_tokens"] == length
            assert seen.linked() == linked
            own = sum(len(llm.get_token_ids(text)) for text in found)
            assert linked >= 0.95 * own
