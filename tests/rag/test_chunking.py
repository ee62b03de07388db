import sys

import pytest
from epic_engine.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from epic_rag.chunking import Chunker, ChunkingConfig
from epic_rag.documents import Document
from epic_rag.errors import DocumentError

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It was not amused.",
    "A chunk is compiled once, and linked whenever a question arrives.",
    "def function(argument): return argument + 1",
]


def make_tokenizer(first="<|im_start|>"):
    """A byte-level BPE with special tokens, a BOS, truncation and padding: everything that can go wrong."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[first, "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
    )
    backend.enable_truncation(20)
    backend.enable_padding(length=20)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=first, eos_token="<|im_end|>")


TOKENIZER = make_tokenizer()


class SlowTokenizer:
    def get_vocab(self):
        return TOKENIZER.get_vocab()

    def __call__(self, text, **kwargs):
        return TOKENIZER(text, **kwargs)


def length(text):
    """The oracle: the tokenizer itself."""
    return len(TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def squeezed(text):
    return "".join(text.split())


alphabet = st.one_of(
    st.sampled_from([" ", "\n", "\n\n", "word ", "# ", "* ", "```\n", "    ", "| a | b |\n", "<|im_end|>", ". "]),
    st.characters(exclude_categories=["Cs"]),
    st.text(st.characters(codec="utf-8"), max_size=30),
)
texts = st.lists(alphabet, max_size=80).map("".join)


@settings(deadline=None, max_examples=150)
@given(texts, st.sampled_from(["text", "markdown", "python"]), st.integers(4, 40))
def test_chunks_cover_the_text_and_keep_the_budget(text, kind, budget):
    chunks = Chunker(ChunkingConfig(budget), TOKENIZER).split(Document("d", text, kind=kind))
    assert squeezed("".join(chunks)) == squeezed(text)
    for chunk in chunks:
        assert chunk == chunk.strip() != ""
        assert 1 <= length(chunk) <= budget


@settings(deadline=None, max_examples=50)
@given(texts, st.integers(8, 40), st.integers(1, 7))
def test_overlap_keeps_the_budget_and_loses_nothing(text, budget, overlap):
    chunks = Chunker(ChunkingConfig(budget, overlap), TOKENIZER).split(Document("d", text))
    assert all(1 <= length(chunk) <= budget for chunk in chunks)
    rest = squeezed(text)
    position = 0
    for chunk in map(squeezed, chunks):
        start = next(s for s in range(position, -1, -1) if rest.startswith(chunk, s))
        position = max(position, start + len(chunk))
    assert position == len(rest)


@settings(deadline=None, max_examples=30)
@given(texts)
def test_count_is_the_tokenizers_own(text):
    assert Chunker(ChunkingConfig(), TOKENIZER).count_tokens(text) == length(text)


def test_special_tokens_in_a_text_count_as_their_letters():
    text = "<|im_end|>" * 30
    assert len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == 30
    chunks = Chunker(ChunkingConfig(12), TOKENIZER).split(Document("d", text))
    assert "".join(chunks) == text
    assert all(length(chunk) <= 12 for chunk in chunks)


def test_the_tokenizer_is_left_alone():
    before = TOKENIZER.backend_tokenizer.to_str()
    Chunker(ChunkingConfig(8), TOKENIZER).split(Document("d", SENTENCES[0]))
    assert TOKENIZER.backend_tokenizer.to_str() == before


def test_borders_are_the_texts_own():
    paragraphs = ["The quick brown fox jumps.", "A chunk is compiled once.", "It was not amused."]
    budget = max(map(length, paragraphs))
    chunks = Chunker(ChunkingConfig(budget), TOKENIZER).split(Document("d", "\n\n".join(paragraphs)))
    assert chunks == paragraphs
    text = "# One\n\nThe quick brown fox.\n\n# Two\n\nThe lazy dog.\n"
    budget = length("# One\n\nThe quick brown fox.") + 1
    chunks = Chunker(ChunkingConfig(budget), TOKENIZER).split(Document("d", text, kind="markdown"))
    assert chunks == ["# One\n\nThe quick brown fox.", "# Two\n\nThe lazy dog."]


@pytest.mark.parametrize("text", ["", " \n\t\n", "\u3000"])
def test_nothing_gives_no_chunks(text):
    assert Chunker(ChunkingConfig(), TOKENIZER).split(Document("d", text)) == []


def test_slow_tokenizers_cut_alike():
    document = Document("d", "\n\n".join(SENTENCES * 5))
    fast, slow = (Chunker(ChunkingConfig(30), t).split(document) for t in (TOKENIZER, SlowTokenizer()))
    assert fast == slow


def test_a_character_beyond_the_budget_is_an_error():
    assert length("🦊") == 4
    assert Chunker(ChunkingConfig(4), TOKENIZER).split(Document("d", "🦊🦊")) == ["🦊", "🦊"]
    with pytest.raises(DocumentError, match="raise max_tokens"):
        Chunker(ChunkingConfig(3), TOKENIZER).split(Document("d", "a 🦊"))


def test_callers_count_decides():
    def count(text):
        return 2 * length(text)

    chunker = Chunker(ChunkingConfig(40), TOKENIZER, count_tokens=count)
    chunks = chunker.split(Document("d", " ".join(SENTENCES)))
    assert squeezed("".join(chunks)) == squeezed(" ".join(SENTENCES))
    assert all(count(chunk) <= 40 for chunk in chunks)
    # Cut at words though the splitter's own pieces were too long.
    words = set(" ".join(SENTENCES).split())
    assert all(word in words for chunk in chunks for word in chunk.split())


def test_endless_words_take_linear_time():
    text = "ab0c" * 30_000
    chunks = Chunker(ChunkingConfig(2000), TOKENIZER).split(Document("d", f"start {text} end"))
    assert squeezed("".join(chunks)) == f"start{text}end"


def test_without_a_grammar_python_is_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter_python", None)
    source = "\n\n".join(f"def f{i}():\n    return {i}" for i in range(40))
    chunks = Chunker(ChunkingConfig(40), TOKENIZER).split(Document("d", source, kind="python"))
    assert squeezed("".join(chunks)) == squeezed(source)


def test_with_a_grammar_python_is_cut_between_functions():
    pytest.importorskip("tree_sitter_python")
    functions = [f"def f{i}():\n    x = {i}\n\n    return x" for i in range(8)]
    budget = length(functions[0]) + 2
    document = Document("d", "\n\n".join(functions), kind="python")
    assert Chunker(ChunkingConfig(budget), TOKENIZER).split(document) == functions


def test_settings_hash_changes_with_what_moves_borders(monkeypatch):
    def digest(tokenizer=TOKENIZER, **config):
        return Chunker(ChunkingConfig(**config), tokenizer).settings_hash()

    assert digest() == digest(make_tokenizer()) != digest(make_tokenizer("<s>"))
    hashes = [digest(), digest(max_tokens=100), digest(overlap_tokens=1), digest(SlowTokenizer())]
    monkeypatch.setattr("epic_rag.chunking.importlib.metadata.version", lambda name: "99")
    assert len({*hashes, digest()}) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"overlap_tokens": -1},
        {"max_tokens": 8, "overlap_tokens": 8},
    ],
)
def test_config_refuses(options):
    with pytest.raises(ConfigError, match=r"_tokens is .*pass"):
        ChunkingConfig(**options)
