"""Two small tokenizers: byte-level BPE (GPT-2's kind) and Metaspace with byte fallback (Llama-2's kind)."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Hello world, this is plain.",
    "emoji 👩‍👩‍👧 and 🇩🇪 flags 🎉🎉",
    "中文和日本語のテキスト。",
    "e\u0301 a\u0308 n\u0303 combining",
    "  two  spaces\n\nand\tlines ",
    "STOP at the STOPwatch",
    "العربية עברית हिन्दी",
]


def _byte_level() -> PreTrainedTokenizerFast:
    """Bytes and a few merges only, so characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>", "<tool>"],
    )
    tokenizer.train_from_iterator(TEXTS[:1] + TEXTS[5:6], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _metaspace() -> PreTrainedTokenizerFast:
    """Llama-2's kind: a space is ``▁``, the text's first one is dropped, unknown characters are bytes."""
    words = ["▁", "▁Hello", "▁world", "Hello", "▁two", "▁ST", "OP", "▁STOP", ",", ".", "lo", "\n", "s"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<tool>", *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", extra_special_tokens=["<tool>"])


TOKENIZERS = {"byte-level": _byte_level(), "metaspace": _metaspace()}


def encode(name: str, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    if name == "byte-level":
        return TOKENIZERS[name].encode(text, add_special_tokens=False)
    known = TOKENIZERS[name].get_vocab()
    spaced, ids, at = "▁" + text.replace(" ", "▁"), [], 0
    while at < len(spaced):  # greedy, longest first
        size = next((n for n in range(8, 0, -1) if spaced[at : at + n] in known), 0)
        if size:
            ids.append(known[spaced[at : at + size]])
        else:
            ids.extend(known[f"<0x{byte:02X}>"] for byte in spaced[at].encode())
        at += size or 1
    return ids
