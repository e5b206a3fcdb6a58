"""A vocabulary that went through GGUF cuts text as the tokenizer it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    BertTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    Qwen2Tokenizer,
    XLMRobertaTokenizer,
)

from penstock.core.errors import ModelLoadError
from penstock.models.load import load_tokenizer
from tests.models.gguf_files import Vocabulary, write_vocabulary

TEXTS = [
    "Hello world, it's a test! We'll see. IT'S LOUD.",
    "def f(x):\n    return x ** 2 + 10_000\n\n\tpass  # done\r\n",
    "Digits 1234567890 and 3.14159, year 2024 and x86",
    "columns   1  23   4567",
    "   leading, trailing and   inner   spaces   ",
    "naïve café e\u0301 Über straße ½ ①",
    "Привет, мир! 你好,世界。こんにちは العربية",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 done",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c",
    "\n\n\n  \n\t\t",
    "",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As the makers of Kimi and DeepSeek V3 publish them.
KIMI_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# As llama.cpp names them.
TINY_AYA_PATTERNS = (
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
VIKING_PATTERNS = (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")
MINICPM5_PATTERNS = (
    r"\p{N}{1,3}",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

Vocab = dict[str, int]
Merges = list[tuple[str, str]]


def train(texts: list[str], pre_tokenizer: Any, **settings: Any) -> tuple[Vocab, Merges]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = BpeTrainer(vocab_size=700, min_frequency=1, show_progress=False, **settings)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def byte_level(*first: Any, use_regex: bool) -> Any:
    return pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )


GPT2 = byte_level(use_regex=True)
SMOLLM = byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True)
FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
)
LLAMA3 = byte_level(pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), use_regex=False)


def splits(*patterns: str) -> Any:
    return byte_level(
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns), use_regex=False
    )


def built_by_hand(pre_tokenizer: Any, **settings: Any) -> Callable[[Vocab, Merges], Tokenizer]:
    def build(vocabulary: Vocab, merges: Merges) -> Tokenizer:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, **settings))
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL)
        return tokenizer

    return build


def built_by_transformers(vocabulary: Vocab, merges: Merges) -> Tokenizer:
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges)._tokenizer
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


BYTE_LEVEL_KINDS = {
    "gpt-2": built_by_hand(GPT2),
    "smollm": built_by_hand(SMOLLM),
    "llama-bpe": built_by_hand(LLAMA3, ignore_merges=True),
    "qwen2": built_by_transformers,
    "falcon": built_by_hand(FALCON),
    "kimi-k2": built_by_hand(splits(KIMI_PATTERN)),
    "deepseek-v3": built_by_hand(splits(*DEEPSEEK_PATTERNS)),
    "tiny_aya": built_by_hand(splits(*TINY_AYA_PATTERNS)),
    "viking": built_by_hand(splits(*VIKING_PATTERNS)),
    "minicpm5": built_by_hand(splits(*MINICPM5_PATTERNS), ignore_merges=True),
}


@pytest.fixture(scope="module")
def byte_level_vocabulary() -> tuple[Vocab, Merges]:
    """Trained without cutting words, so that each rule of cutting makes a difference to what gets merged."""
    whole_lines = byte_level(pre_tokenizers.Split("\n", "isolated"), use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(TEXTS * 2, whole_lines, special_tokens=SPECIAL, initial_alphabet=alphabet)


def stored(vocabulary: Vocab, merges: Merges, pre: str) -> Vocabulary:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        types=[3 if token in SPECIAL else 1 for token in tokens],
        merges=[f"{left} {right}" for left, right in merges],
        settings={"add_bos_token_id": 1, "add_eos_token_id": 2, "add_chat_template": "{{ messages }}"},
    )


def reloaded(path: Path) -> Tokenizer:
    files = load_tokenizer(path)
    assert files is not None
    return Tokenizer.from_buffer(files.tokenizer_json)


@pytest.mark.parametrize("pre", BYTE_LEVEL_KINDS)
def test_byte_level_kinds(pre: str, byte_level_vocabulary: tuple[Vocab, Merges], tmp_path: Path) -> None:
    vocabulary, merges = byte_level_vocabulary
    ours = reloaded(write_vocabulary(tmp_path / "a.gguf", stored(vocabulary, merges, pre)))
    theirs = BYTE_LEVEL_KINDS[pre](vocabulary, merges)
    for text in TEXTS:
        encoded = ours.encode(text, add_special_tokens=False)
        assert encoded.ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(encoded.ids, skip_special_tokens=False) == theirs.decode(
            encoded.ids, skip_special_tokens=False
        )


def test_kinds_that_are_the_same_under_another_name(
    byte_level_vocabulary: tuple[Vocab, Merges], tmp_path: Path
) -> None:
    for pre, known in (("glm4", "llama-bpe"), ("glm5", "llama-bpe"), ("joyai-llm", "deepseek-v3")):
        ours = reloaded(write_vocabulary(tmp_path / f"{pre}.gguf", stored(*byte_level_vocabulary, pre)))
        theirs = BYTE_LEVEL_KINDS[known](*byte_level_vocabulary)
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids


def test_the_kinds_differ_on_these_texts(byte_level_vocabulary: tuple[Vocab, Merges], tmp_path: Path) -> None:
    results = {
        tuple(tuple(build(*byte_level_vocabulary).encode(text).ids) for text in TEXTS)
        for build in BYTE_LEVEL_KINDS.values()
    }
    assert len(results) == len(BYTE_LEVEL_KINDS)


def test_special_tokens_and_template(byte_level_vocabulary: tuple[Vocab, Merges], tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", stored(*byte_level_vocabulary, "smollm"))
    files = load_tokenizer(path)
    assert files is not None
    assert files.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert files.bos_token_id == 1
    assert not files.add_bos_token
    assert files.eos_token_ids == (2, 0)  # the one that metadata names first
    assert files.chat_template == "{{ messages }}"
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "a"


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end|>", "<|endoftext|>", "<|im_end|>"], ["<|end|>", "<|endoftext|>", "<|im_end|>"]),
        # In gpt-oss and Solar, a message ends here, and the answer goes on.
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),
        (["<|end|>", "<|call|>"], ["<|end|>", "<|call|>"]),
        (["<turn|>", "<|tool_response>"], ["<turn|>", "<|tool_response>"]),
        (["<eos>", "<end_of_turn>", "_<EOT>"], ["<eos>", "<end_of_turn>", "_<EOT>"]),
    ],
)
def test_control_tokens_that_end_answers(tokens: list[str], ends: list[str], tmp_path: Path) -> None:
    table = [*tokens, "a", "b", "ab"]
    types = [3] * len(tokens) + [1] * 3
    path = write_vocabulary(tmp_path / "a.gguf", Vocabulary(tokens=table, types=types))
    files = load_tokenizer(path)
    assert files is not None
    assert {table[token_id] for token_id in files.eos_token_ids} == set(ends)


def test_first_and_last_tokens_that_a_file_does_not_name(tmp_path: Path) -> None:
    vocabulary, *_ = sentencepiece(True)
    files = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", replace(vocabulary, settings={})))
    assert files is not None
    assert (files.bos_token_id, files.add_bos_token, files.eos_token_ids) == (1, True, (2,))


def test_gemma4_always_begins_with_its_first_token(tmp_path: Path) -> None:
    vocabulary, _, merges = sentencepiece(False)
    denied = {**vocabulary.settings, "add_add_bos_token": False}
    pairs = [f"{left} {right}" for left, right in merges]
    gemma4 = replace(vocabulary, kind="gemma4", pre=None, merges=pairs, settings=denied)
    files = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", gemma4))
    assert files is not None
    assert files.add_bos_token


def sentencepiece(add_space_prefix: bool) -> tuple[Vocabulary, Vocab, Merges]:
    """A vocabulary as SentencePiece lays it out: special, 256 bytes, then pieces whose score is their rank."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = ["▁", "\n"]
    lines = [text.replace(" ", "▁") for text in TEXTS[:6]] * 2
    learned, merges = train(lines, pre_tokenizers.Split("\n", "isolated"), initial_alphabet=alphabet)
    merged = [left + right for left, right in merges]
    characters = sorted(set(learned) - set(merged))
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*specials, *byte_tokens, *merged, *characters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(characters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(characters))
    vocabulary = Vocabulary(
        kind="llama",
        pre="default",
        tokens=tokens,
        types=types,
        merges=None,
        scores=scores,
        settings={
            "add_bos_token_id": 1,
            "add_eos_token_id": 2,
            "add_unk_token_id": 0,
            "add_add_space_prefix": add_space_prefix,
        },
    )
    return vocabulary, {token: index for index, token in enumerate(tokens)}, merges


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma4"])
def test_sentencepiece_kinds(name: str, tmp_path: Path) -> None:
    add_space_prefix = name == "llama"
    vocabulary, table, merges = sentencepiece(add_space_prefix)
    if name == "gemma4":  # merges in place of scores, which say nothing
        scores, pairs = [0.0] * len(table), [f"{left} {right}" for left, right in merges]
        vocabulary = replace(vocabulary, kind="gemma4", pre=None, scores=scores, merges=pairs)
    path = write_vocabulary(tmp_path / "a.gguf", vocabulary)
    ours = reloaded(path)
    kind: Any = LlamaTokenizer if add_space_prefix else GemmaTokenizer
    theirs = kind(vocab=table, merges=merges)._tokenizer
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        # SentencePiece puts a space in front always, transformers' LlamaTokenizer only where there is none.
        spaced = " " + text if add_space_prefix and text.startswith(" ") else text
        expected = theirs.encode(spaced, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ids == expected, text
    files = load_tokenizer(path)
    assert files is not None
    assert files.add_bos_token
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("is_cased", [False, True])
def test_wordpiece(is_cased: bool, tmp_path: Path) -> None:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(
        {letter for text in TEXTS for letter in (text if is_cased else text.lower()) if letter.strip()}
    )
    own = [
        *specials,
        *letters,
        *(f"##{letter}" for letter in letters),
        "hello",
        "##ello",
        "world",
        "di",
        "##gits",
    ]
    stored = [
        token if token in specials else token[2:] if token.startswith("##") else f"▁{token}" for token in own
    ]
    types = [3] * len(specials) + [1] * (len(own) - len(specials))
    settings = {"add_bos_token_id": 2, "add_eos_token_id": 3, "add_add_bos_token": True}
    vocabulary = Vocabulary(kind="bert", pre=None, tokens=stored, types=types, merges=None, settings=settings)
    path = write_vocabulary(tmp_path / "a.gguf", vocabulary)
    table = {token: index for index, token in enumerate(own)}
    theirs = BertTokenizer(vocab=table, do_lower_case=not is_cased)._tokenizer
    ours = reloaded(path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.encode("a", "b").ids == theirs.encode("a", "b").ids
    files = load_tokenizer(path)
    assert files is not None
    assert files.special_tokens == {"bos_token": "[CLS]", "eos_token": "[SEP]"}


UNIGRAM_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def test_unigram_of_an_encoder(tmp_path: Path) -> None:
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")} - {"\n", "\t", "\r"})
    tokens = [*UNIGRAM_SPECIALS, *letters, "▁wor", "ld", "▁test", "est", "igits", "▁1", "234"]
    scores = [0.0] * 4 + [-9.0 - 0.01 * n for n in range(len(letters))] + [-3.0 - n for n in range(7)]
    ends = {
        "add_bos_token_id": 0,
        "add_eos_token_id": 2,
        "add_add_bos_token": True,
        "add_add_eos_token": True,
    }
    types = [3, 3, 3, 2] + [1] * (len(tokens) - 4)
    vocabulary = Vocabulary("t5", "default", tokens, types, None, scores, settings=ends)
    path = write_vocabulary(tmp_path / "a.gguf", vocabulary, is_causal=False)
    theirs = XLMRobertaTokenizer(vocab=list(zip(tokens, scores, strict=True)))._tokenizer
    ours = reloaded(path)
    for text in TEXTS:
        if "\n" not in text:  # a table of characters, which is not in this file, makes line ends spaces
            assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.encode("a", "b").ids == theirs.encode("a", "b").ids


def test_byte_level_of_an_encoder(byte_level_vocabulary: tuple[Vocab, Merges], tmp_path: Path) -> None:
    vocabulary = stored(*byte_level_vocabulary, "roberta-bpe")
    ours = reloaded(write_vocabulary(tmp_path / "a.gguf", vocabulary, is_causal=False))
    plain = built_by_hand(GPT2)(*byte_level_vocabulary)
    first, second = (plain.encode(text).ids for text in TEXTS[:2])
    assert ours.encode(TEXTS[0]).ids == [1, *first, 2]
    assert ours.encode(TEXTS[0], TEXTS[1]).ids == [1, *first, 2, 2, *second, 2]
    without = replace(vocabulary, settings={**vocabulary.settings, "add_add_bos_token": False})
    ours = reloaded(write_vocabulary(tmp_path / "b.gguf", without, is_causal=False))
    assert ours.encode(TEXTS[0]).ids == [*first, 2]


@pytest.mark.parametrize("adds_first", [True, False])
def test_last_token_of_a_decoder_for_vectors(
    byte_level_vocabulary: tuple[Vocab, Merges], adds_first: bool, tmp_path: Path
) -> None:
    vocabulary = stored(*byte_level_vocabulary, "qwen2")
    ends = {"add_add_bos_token": adds_first, "add_add_eos_token": True}
    ends = replace(vocabulary, settings={**vocabulary.settings, **ends})
    ours = reloaded(write_vocabulary(tmp_path / "a.gguf", ends))
    plain = reloaded(write_vocabulary(tmp_path / "b.gguf", vocabulary))
    text = plain.encode(TEXTS[0]).ids
    assert ours.encode(TEXTS[0]).ids == [*([1] if adds_first else []), *text, 2]
    assert ours.encode(TEXTS[0], add_special_tokens=False).ids == text, "of a prompt"


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (Vocabulary(kind="rwkv"), "kind 'rwkv'"),
        (Vocabulary(kind="t5", scores=None), "no scores for each"),
        (Vocabulary(kind="bert"), r"no token \[CLS\]"),
        (Vocabulary(pre="unheard-of"), "rule 'unheard-of'"),
        (Vocabulary(merges=["a c"]), "merges 'a c'"),
        (Vocabulary(merges=None), "no list of merges"),
        (Vocabulary(types=[1]), "no token_type for each"),
        (Vocabulary(kind="llama", scores=None), "no scores for each"),
        (Vocabulary(settings={"add_eos_token_id": 4}), "eos_token_id 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_named(vocabulary: Vocabulary, message: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", vocabulary)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(path)
