"""The text to calibrate and to measure with, where the user gives none: the reference of the Python language, which
every Python carries with it. One half is for calibration, the other for measuring."""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import ConfigError


def default_texts() -> tuple[str, str]:
    """To calibrate with, to measure with; they have no paragraph in common."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "This Python lacks its own reference, which is the default text.",
            hint="Give texts with --calibration and --evaluation.",
        ) from error
    pages = [topics[name] for name in sorted(topics)]
    evaluation = "\n\n".join(pages[1::2])
    # Some pages repeat parts of others.
    kept = set(paragraphs(evaluation))
    calibration = [part for page in pages[0::2] for part in paragraphs(page) if part not in kept]
    return "\n\n".join(calibration), evaluation


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The text {path} cannot be read: {error}.") from error
