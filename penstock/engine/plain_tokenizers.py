"""Makes tokenizers for engines whose model has none. Knows no torch."""

from __future__ import annotations

import json

END_TOKEN = "<|end|>"
NUM_BYTES = 256


def byte_tokenizer_json() -> bytes:
    """A `tokenizers` file in which token i is byte i, and one special token ends an answer."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": NUM_BYTES,
                    "content": END_TOKEN,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    ).encode()


def numbered_tokenizer_json(vocab_size: int) -> bytes:
    """A `tokenizers` file in which token i is the word i: enough to see and to count what random weights say."""
    vocabulary = {str(token_id): token_id for token_id in range(vocab_size)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
        }
    ).encode()


def _byte_characters() -> dict[int, str]:
    """The printable stand-ins that byte-level tokenizers use for bytes, by byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    stand_ins = dict(zip(printable, map(chr, printable), strict=True))
    others = (byte for byte in range(NUM_BYTES) if byte not in stand_ins)
    stand_ins.update({byte: chr(NUM_BYTES + offset) for offset, byte in enumerate(others)})
    return stand_ins
