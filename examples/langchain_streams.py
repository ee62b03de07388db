"""Many answers at once on one event loop: how long does the loop stall, and what does a cancelled answer leave behind?

Run: python examples/langchain_streams.py [STREAMS]
Needs: pip install "epic-rag[demo,langchain]"
"""

import asyncio
import sys
import time
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_epic import ChatEpic, compile_documents, document_block, text_id

STREAMS = int(sys.argv[1]) if len(sys.argv) > 1 else 8


async def stalls(seen: list[float]) -> None:
    """Notes how much later than asked for the loop comes back."""
    while True:
        asked = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        seen.append(time.perf_counter() - asked)


async def answer(llm: ChatEpic, message: HumanMessage) -> tuple[float, str]:
    begin, first, text = time.perf_counter(), 0.0, ""
    async for chunk in llm.astream([message]):
        first = first or time.perf_counter() - begin
        text += chunk.text
    return first, text


async def main() -> None:
    with ChatEpic(model="smollm2", context="head", policy="legolink:16", max_tokens=24) as llm:
        texts = [p.read_text() for p in sorted((Path(__file__).parent / "corpus").glob("*.md"))]
        documents = [Document(text[:1500]) for text in texts]
        await asyncio.to_thread(compile_documents, llm, documents)
        blocks = [document_block(text_id(d), d.page_content) for d in documents]
        messages = [HumanMessage([*blocks[:3], f"Which name stands first? ({n})"]) for n in range(STREAMS)]
        alone = [await answer(llm, message) for message in messages]

        seen: list[float] = []
        ticker = asyncio.create_task(stalls(seen))
        tasks = [asyncio.create_task(answer(llm, message)) for message in messages]
        cancelled = asyncio.create_task(answer(llm, messages[0]))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        together = await asyncio.gather(*tasks)
        ticker.cancel()
        print(f"{STREAMS} streams and one that was cancelled: {len(seen)} turns of the loop")
        print(f"longest stall {max(seen) * 1e3:.1f} ms, 99 % below {sorted(seen)[int(len(seen) * 0.99)] * 1e3:.1f} ms")
        print(f"first tokens after {min(t for t, _ in together):.2f} to {max(t for t, _ in together):.2f} s")
        print(f"answers equal those given alone: {[t for _, t in together] == [t for _, t in alone]}")


asyncio.run(main())
