"""Ingest a folder, ask a question, see what was reused. Run: python examples/quickstart.py [STORE]."""

import sys
import tempfile
from pathlib import Path

from epic_rag import ChunkingConfig, EpicRAG

store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="epic-rag-")
handbook = Path(__file__).parent / "corpus"

# Short chunks: a 135M model does not find a fact in long ones.
with EpicRAG.open(store, "smollm2", chunking=ChunkingConfig(max_tokens=128)) as rag:
    print(rag.add(handbook))
    answer = rag.ask("Who founded Saltmarsh Cycles?", k=4)
    print(answer.text)
    for source in answer.sources:
        print(f"  {source.score:.2f}  {source.chunk_id}")
    stats = answer.stats
    print(f"{stats.reused} of {stats.prompt} prompt tokens reused, first token after {stats.times.first_token:.2f} s")
