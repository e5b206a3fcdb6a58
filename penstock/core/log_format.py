"""Formats log lines as text or JSON, and keeps credentials out of them.

A call may add fields with `extra={"fields": {...}}`; in the text format the message alone must say enough.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

# The shape of credentials, anywhere in a message or a traceback.
_SECRETS = re.compile(
    r"(?i)\b(bearer|basic)\s+[\w\-.~+/=]{6,}"
    r"|\b(sk-|pk-)[\w\-]{8,}"
    r"|\b(x-api-key|api[_-]?key|password|authorization)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",;]{4,}"
    r"|\beyJ[\w\-]{8,}\.[\w\-]{4,}\.[\w\-]*"
    r"|(://[^\s:/@]+:)[^\s:/@]+(?=@)"
)


def without_secrets(text: str) -> str:
    """Return `text` with everything masked that looks like a credential."""

    def mask(match: re.Match[str]) -> str:
        scheme, prefix, name, assignment, url_start = match.groups()
        if name is not None:
            return f"{name}{assignment}***"
        return f"{scheme} ***" if scheme else f"{prefix or url_start or ''}***"

    return _SECRETS.sub(mask, text)


# Characters that could begin a new line, control a terminal, or turn the direction of what follows them.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def on_one_line(text: str) -> str:
    """Return `text` with control characters spelt out: a message may hold what a client sent, such as a path."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


class TextFormatter(logging.Formatter):
    """Writes one line for each message; the lines of a traceback follow it."""

    default_msec_format = ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = on_one_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


class JsonFormatter(logging.Formatter):
    """Writes one object per line. Additional fields never hide the standard ones."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process  # the kind of process: gateway or engine

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = line | (getattr(record, "fields", None) or {}) | line
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(_masked(line), ensure_ascii=False, default=str)


def _masked(value: Any) -> Any:
    """Mask credentials before encoding, because quotes look different in JSON."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        return {name: _masked(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return value


def set_up_logs(process: str, log_format: str, level: int | str) -> None:
    """Write the log of an engine's process to standard error."""
    handler = logging.StreamHandler()
    text_format = f"%(asctime)s %(levelname)s {process}: %(message)s"
    handler.setFormatter(formatter(log_format, process=process, text_format=text_format))
    logging.basicConfig(level=level, handlers=[handler])


def formatter(log_format: str, *, process: str, text_format: str) -> logging.Formatter:
    return JsonFormatter(process) if log_format == "json" else TextFormatter(text_format)
