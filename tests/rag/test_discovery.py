"""Finding chunks in prompts, against a search for every text at every place."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from epic_rag.discovery import Match, TextIndex
from epic_rag.evaluation.filler import prose


def index_of(texts: dict[str, str]) -> TextIndex:
    index = TextIndex()
    for name, text in texts.items():
        index.add(name, text)
    return index


def everywhere(texts: dict[str, str], prompt: str) -> list[Match]:
    found = []
    for name, text in texts.items():
        at = prompt.find(text.strip())
        while at >= 0:
            found.append(Match(at, at + len(text.strip()), name))
            at = prompt.find(text.strip(), at + 1)
    return found


def cover(matches: list[Match]) -> int:
    return sum(m.stop - m.start for m in matches)


def most_that_can_be_covered(matches: list[Match]) -> int:
    best = 0
    for size in range(1, len(matches) + 1):
        for some in combinations(matches, size):
            ordered = sorted(some, key=lambda m: m.start)
            if all(a.stop <= b.start for a, b in pairwise(ordered)):
                best = max(best, cover(ordered))
    return best


words = st.sampled_from(
    ["alpha", "beta", "gamma", "delta", "epsilon", "Zürich", "日本語", "naïve", "{x}", "42", "\r\n"]
)
texts = st.lists(words, min_size=3, max_size=14).map(" ".join).filter(lambda t: len(t.strip()) >= 10)


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5, unique=True), st.data())
def test_it_finds_what_a_search_for_everything_finds(chunks: list[str], data: st.DataObject) -> None:
    named = {f"c{i}": text for i, text in enumerate(chunks)}
    pieces = data.draw(st.lists(st.one_of(st.sampled_from(chunks), texts), max_size=5))
    prompt = data.draw(st.sampled_from(["\n\n", " ", "\n---\n"])).join(pieces)
    found = index_of(named).find(prompt)
    assert all(prompt[m.start : m.stop] == named[m.name].strip() for m in found)
    assert all(a.stop <= b.start for a, b in pairwise(found))
    wanted = everywhere(named, prompt)
    # Inside a word nothing is looked for.
    wanted = [m for m in wanted if m.start == 0 or not (prompt[m.start - 1].isalnum() and prompt[m.start].isalnum())]
    if len(wanted) <= 10:
        assert cover(found) >= most_that_can_be_covered(wanted)


def test_chunks_with_the_same_header_are_told_apart() -> None:
    header = "file_path: /home/somebody/documents/manuals/handbook.md\nfile_name: handbook.md\npage_label: 1\n\n"
    chunks = {f"n{i}": header + " ".join(p) for i, p in enumerate(prose()[:200])}
    index = index_of(chunks)
    prompt = "Context information is below.\n" + "\n\n".join(chunks[f"n{i}"] for i in (7, 3, 150)) + "\nQuery: why?"
    assert [m.name for m in index.find(prompt)] == ["n7", "n3", "n150"]
    assert index.find(prompt.replace("handbook.md", "handbook.txt")) == []


def test_a_text_whose_first_word_begins_too_late_for_a_long_anchor() -> None:
    text = "{x} beta beta beta Zürich Zürich"
    index = TextIndex()
    assert index.add("a", text)
    assert index.find(f"See {text}.") == [Match(4, 36, "a")]


def test_white_space_around_a_text_does_not_matter() -> None:
    index = index_of({"a": "\n  The crane lifts four tonnes on good days.\n\n"})
    (match,) = index.find("See: The crane lifts four tonnes on good days. Why?")
    assert (match.start, match.stop) == (5, 46)


def test_what_changed_or_went_is_not_found() -> None:
    index = index_of(
        {"a": "The crane lifts four tonnes on good days.", "b": "The crane lifts four tonnes on good days."}
    )
    prompt = "The crane lifts four tonnes on good days."
    assert [m.name for m in index.find(prompt)] == ["a"]
    index.discard(["a", "unknown"])
    assert [m.name for m in index.find(prompt)] == ["b"]
    index.add("b", "The crane lifts nine tonnes on good days.")
    assert index.find(prompt) == []
    assert len(index) == 1
    assert "b" in index


def test_short_and_wordless_texts() -> None:
    index = TextIndex()
    assert index.add("short", "Open: 9 to 5.")
    assert not index.add("tiny", "No.")
    assert not index.add("lines", "-" * 50)
    assert not index.add("empty", "  ")
    assert [m.name for m in index.find("When? Open: 9 to 5. No.")] == ["short"]


def test_a_long_text_beats_the_short_ones_in_it() -> None:
    long = "The crane lifts four tonnes on good days. The ferry leaves at noon and at dusk."
    index = index_of({"part": "The ferry leaves at noon and at dusk.", "whole": long})
    assert [m.name for m in index.find(f"{long} And: The ferry leaves at noon and at dusk.")] == ["whole", "part"]
