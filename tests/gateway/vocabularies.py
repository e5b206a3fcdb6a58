"""Small tokenizers of the kinds that real models bring, made on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_CORPUS = [
    "the quick brown fox jumps",
    "naïve café über straße",
    "日本語のテキスト 中文 😀😃🎉 👩‍👩‍👧",
    "def f(x):\n    return x\n",
]


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen and SmolLM2: tokens are byte strings that often end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "naïve→"])
    return tokenizer


def _sentencepiece_model() -> models.BPE:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "▁t", "▁th", "▁the", "he", "in"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("i", "n")]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


@cache
def sentencepiece() -> Tokenizer:
    """Like Llama 2 and Mistral: word starts are marked, rare characters fall back to byte tokens."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """A decoder that the gateway has no table for, so that it decodes windows of tokens."""
    tokenizer = Tokenizer(_sentencepiece_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
