"""Tokenizers in other files than tokenizer.json cut text as the libraries that wrote them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from penstock.core.errors import ModelLoadError
from penstock.models.load import load_tokenizer
from penstock.models.split_rules import SPLIT_RULES
from penstock.models.tokenizer import TokenizerFiles
from tests.models.test_gguf_tokenizer import KIMI_PATTERN, TEXTS

PLAIN = [text for text in TEXTS if "<|" not in text]


def read(folder: Path) -> tuple[TokenizerFiles, Tokenizer]:
    files = load_tokenizer(folder)
    assert files is not None
    return files, Tokenizer.from_buffer(files.tokenizer_json)


@pytest.mark.parametrize("prefixes_space", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, prefixes_space: bool, tmp_path: Path) -> None:
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PLAIN * 20),
        model_writer=stored,
        model_type=kind,
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=prefixes_space,
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=kind == "unigram",
        user_defined_symbols=["<|im_start|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(stored.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=stored.getvalue())
    files, ours = read(tmp_path)
    for text in PLAIN:
        if kind == "unigram":
            text = " ".join(text.split())  # spaces at the ends are cut by SentencePiece alone
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text
    assert ours.token_to_id("<|im_start|>") == theirs.piece_to_id("<|im_start|>")
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (files.bos_token_id, files.add_bos_token, files.eos_token_ids) == (1, True, (2,))


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Trained by merging, so that every token comes from two others."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(_letters())}
    in_order = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {bytes(byte_of[letter] for letter in token): rank for rank, (token, _) in enumerate(in_order)}


def _letters() -> list[str]:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {}
    for point in range(0x250):
        encoded = chr(point).encode()
        letters.update(zip(encoded, cut.pre_tokenize_str(chr(point))[0][0], strict=True))
    # Bytes that no text of these characters has stand for themselves, or come after 255 in their order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [
        letters.get(byte) or chr(byte if byte in printable else 256 + others.index(byte))
        for byte in range(256)
    ]


def test_tekken(ranks: dict[bytes, int], tmp_path: Path) -> None:
    pattern = SPLIT_RULES["tekken"].patterns[0]
    names = ["<unk>", "<s>", "</s>", "[INST]"]
    stored = {
        "config": {
            "pattern": pattern,
            "default_vocab_size": len(ranks) + 10,
            "default_num_special_tokens": 10,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in ranks.items()
        ],
        "special_tokens": [{"rank": rank, "token_str": name} for rank, name in enumerate(names)],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(stored))
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    files, ours = read(tmp_path)
    for text in TEXTS:
        expected = [10 + rank for rank in theirs.encode(text)]
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected) == text
    assert ours.encode("[INST]").ids == [3]
    assert (files.bos_token_id, files.add_bos_token, files.eos_token_ids) == (1, True, (2,))


@pytest.mark.parametrize(
    ("name", "kind", "pattern"),
    [
        ("qwen.tiktoken", "QWenTokenizer", SPLIT_RULES["qwen2"].patterns[0]),
        ("tiktoken.model", "TikTokenTokenizer", KIMI_PATTERN),
    ],
)
def test_ranks_of_tiktoken(
    name: str, kind: str, pattern: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (tmp_path / name).write_text("\n".join(lines))
    with pytest.raises(ModelLoadError, match="the pattern that cuts text is in the code"):
        load_tokenizer(tmp_path)
    end: dict[str, Any] = {"content": "<|im_end|>", "special": True}
    settings = {"tokenizer_class": kind, "added_tokens_decoder": {str(len(ranks)): end}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|im_end|>": len(ranks)}
    )
    _, ours = read(tmp_path)
    for text in TEXTS:
        if "e\u0301" not in text:  # Qwen's own class normalizes, tiktoken alone does not
            assert ours.encode(text).ids == theirs.encode(text, allowed_special={"<|im_end|>"}), text


def test_a_vocabulary_with_merges(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 400}))
    files, ours = read(tmp_path)
    assert [ours.encode(text).ids for text in PLAIN] == [tokenizer.encode(text).ids for text in PLAIN]
    assert ours.encode("a<|im_end|>").ids[-1] == 400
    assert not files.add_bos_token
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelLoadError, match=r"no merges\.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"\x0a\xff\xff\x03<s>"),
        ("tokenizer.model", b"\xff" * 64),
        ("tokenizer.model", b"\x0a\x05\x0a\x03\xff\xfe\xfd"),
        ("tekken.json", b"{}"),
        (
            "tekken.json",
            b'{"config": {"pattern": "a", "default_vocab_size": 1, "default_num_special_tokens": 0}, "vocab": []}',
        ),
        ("vocab.json", b"[1]"),
    ],
    ids=["cut short", "endless number", "no text", "empty", "no bytes", "list"],
)
def test_damaged_files_are_sentences(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "merges.txt").touch()
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)
