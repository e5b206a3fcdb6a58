"""Turns objects as Gemma 4 writes them into JSON: keys without quotes, and texts between a quote that is a token."""

from __future__ import annotations

import json
import re
from functools import lru_cache


def bare_to_json(text: str, quote: str) -> str | None:
    """Return JSON for `{city:<|"|>Rome<|"|>,days:3}`, which may be JSON in part. None for text that is neither."""
    made, position, pattern = [], 0, _pattern(quote)
    while position < len(text):
        found = pattern.match(text, position)
        if found is None:
            return None
        if found["text"] is not None:
            made.append(json.dumps(found["text"], ensure_ascii=False))
        else:
            made.append(json.dumps(found["key"], ensure_ascii=False) if found["key"] else found[0])
        position = found.end()
    written = "".join(made).strip()
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        return None
    return written


@lru_cache(maxsize=8)
def _pattern(quote: str) -> re.Pattern[str]:
    mark = re.escape(quote)
    plain = r'"(?:[^"\\]|\\.)*"|[{}\[\],:\s]|-?\d[\w.+-]*|true|false|null'
    return re.compile(rf'{mark}(?P<text>.*?){mark}|(?P<key>[^\s{{}}\[\],:"<]+)(?=\s*:)|{plain}', re.DOTALL)
