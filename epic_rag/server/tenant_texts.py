"""Everything compiled that a tenant's prompts may hold: chunks that clients made, and chunks of documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from epic_engine import ChunkKey, ChunkNotFoundError, Engine, LinkPolicy

from epic_rag.corpus import CorpusCompiler
from epic_rag.discovery import Match, TextIndex, best_cover
from epic_rag.errors import DocumentNotFoundError
from epic_rag.prompt import PromptComposer, TextPart
from epic_rag.registry import ChunkRecord, Registry
from epic_rag.structured import Grammars
from epic_rag.texts import CompiledTexts, Prompt

__all__ = ["CompiledSource", "RegistryIndex", "TenantTexts"]


@dataclass(frozen=True)
class CompiledSource:
    """A registry of compiled texts.

    Attributes
    ----------
    prefix
        Of its texts' names; tells sources apart.
    registry, compiler
        Where the texts are, and what gives their KV.
    index
        Brings an index of the texts in step with the registry, and returns it.
    suffix
        What the ids of its chunks have behind the index's names.
    ending
        What stands behind every text in its token ids, and so must stand behind it in a prompt.
    """

    prefix: str
    registry: Registry
    compiler: CorpusCompiler
    index: Callable[[], TextIndex]
    suffix: str = ""
    ending: str = ""

    def matches(self, text: str) -> list[Match]:
        """Wherever its texts stand in another."""
        found = [replace(m, name=f"{self.prefix}{m.name}{self.suffix}") for m in self.index().matches(text)]
        if not self.ending:
            return found
        return [replace(m, stop=m.stop + len(self.ending)) for m in found if text.startswith(self.ending, m.stop)]

    def record(self, name: str) -> ChunkRecord | None:
        """The chunk of a name; None if it is gone."""
        try:
            return self.registry.chunk(name.removeprefix(self.prefix))
        except DocumentNotFoundError:
            return None


class RegistryIndex:
    """An index of all texts of a registry. Any number of threads may use one.

    Parameters
    ----------
    registry
        Its chunks are named by their ids.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._index = TextIndex()
        self._indexed_at = -1
        self._lock = threading.Lock()

    def synced(self) -> TextIndex:
        """The index, in step with the registry, which other processes may have changed."""
        with self._lock:
            now = self._registry.changes_token()
            if now != self._indexed_at:
                texts = self._registry.all_texts()
                self._index.discard([name for name in self._index if name not in texts])
                for name, text in texts.items():
                    self._index.add(name, text)
                self._indexed_at = now
            return self._index


class TenantTexts:
    """Finds the compiled texts of several sources in prompts. Any number of threads may use one.

    Parameters
    ----------
    texts
        Chunks that clients made; theirs are the engine, the composer and the grammars.
    policy
        Link policy.
    """

    def __init__(self, texts: CompiledTexts, policy: LinkPolicy) -> None:
        self.engine: Engine = texts.engine
        self.composer: PromptComposer = texts.composer
        self.policy = policy
        self._texts = texts
        clients = CompiledSource("t:", texts.registry, texts.compiler, texts.index, suffix="#0")
        self._sources: tuple[CompiledSource, ...] = (clients,)

    @property
    def clients(self) -> CompiledSource:
        """Chunks that clients made."""
        return self._sources[0]

    def add_source(self, source: CompiledSource) -> None:
        """Look into another registry, too."""
        self._sources = (*self._sources, source)

    @property
    def grammars(self) -> Grammars:
        """What holds answers to a form; raises as :attr:`CompiledTexts.grammars`."""
        return self._texts.grammars

    def record(self, name: str) -> ChunkRecord | None:
        """The chunk of a name; None if it is gone."""
        source = self._source(name)
        return source.record(name) if source else None

    def part(self, name: str) -> TextPart | None:
        """A compiled text as a prompt holds it; None if it is gone."""
        source = self._source(name)
        record = source.record(name) if source else None
        return TextPart(record.text + source.ending, name) if source and record else None

    def length(self, name: str) -> int:
        """Tokens of a compiled text; 0 if it is gone."""
        record = self.record(name)
        return len(record.token_ids) if record else 0

    def _source(self, name: str) -> CompiledSource | None:
        return next((s for s in self._sources if name.startswith(s.prefix)), None)

    def find(self, text: str) -> list[TextPart]:
        """A text cut into the compiled texts that it holds and what stands between them."""
        parts: list[TextPart] = []
        at = 0
        for match in best_cover([m for source in self._sources for m in source.matches(text)]):
            parts += [TextPart(text[at : match.start])] if match.start > at else []
            parts.append(TextPart(text[match.start : match.stop], match.name))
            at = match.stop
        return [*parts, TextPart(text[at:])] if at < len(text) else parts

    def prompt(self, parts: Sequence[tuple[int, ...] | TextPart]) -> Prompt:
        """Segments for the engine: compiled texts by their keys, everything else by its token ids."""
        return [self._key_or_ids(part) if isinstance(part, TextPart) else part for part in parts]

    def _key_or_ids(self, part: TextPart) -> ChunkKey | tuple[int, ...]:
        source = self._source(part.name or "")
        record = source.record(part.name or "") if source else None
        # Somebody may have removed or changed the text since it was found.
        if source is not None and record is not None and record.text + source.ending == part.text:
            return source.compiler.form_of(record)
        if not part.text:  # token ids that no text has
            raise ChunkNotFoundError("a chunk of token ids was deleted while a prompt with it was put together.")
        return tuple(self.composer.tokenizer.encode_text(part.text))
