"""The tokenizer that grammars are matched with: the model's own, but no text spells one of its special tokens.

Where a grammar leaves no choice, the matcher tokenizes what must come next with the tokenizer that it was given. From
a grammar that spells `<tool_call>` the model's own tokenizer would make the one token of that name, which the matcher
then refuses, because for it such a token is no text. So they get names here that no grammar would spell; a grammar
that means the token, and not its letters, refers to it by number (`core.grammar_text`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.grammar_text import token_ids_by_number


def with_unspellable_tokens(tokenizer_json: bytes) -> str:
    """The same `tokenizers` file under other names. Ids stay what they are."""
    names = {
        name: f"\ue000{token_id}\ue001" for name, token_id in token_ids_by_number(tokenizer_json).items()
    }
    file: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    for token in file.get("added_tokens") or ():
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["special"] = True
            token["normalized"] = False
    vocabulary = file["model"].get("vocab")
    if isinstance(vocabulary, dict):
        file["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):  # pieces with their scores, in the order of their ids
        file["model"]["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    unknown = file["model"].get("unk_token")
    if unknown in names:
        file["model"]["unk_token"] = names[unknown]
    # It would put special tokens, by their names, around a whole text: nothing that a grammar ever asks for.
    file["post_processor"] = None
    return msgspec.json.encode(file).decode()
