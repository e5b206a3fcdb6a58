"""The documentation lists every family, and every family is compared with transformers."""

from __future__ import annotations

from pathlib import Path

from penstock.models.decoder import Decoder
from penstock.models.families import FAMILIES
from tests.models.checkpoints import MODELS
from tests.models.tiny_families import TINY

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def row(family: type[Decoder]) -> str:
    classes = [name for name in family.huggingface_names if not name.islower()]
    gguf = ", ".join(f"`{name}`" for name in family.gguf_names)
    return f"| {', '.join(f'`{name}`' for name in classes)} | {gguf or '–'} |"


def test_the_page_lists_every_family() -> None:
    """A missing row is printed as it should stand in the page."""
    page = PAGE.read_text()
    assert not [row(family) for family in FAMILIES if row(family) not in page]


def test_every_family_is_compared_with_transformers() -> None:
    compared = {tiny.model_type.removesuffix("_text") for tiny in TINY.values()} | {
        name.replace("-", "_") for name in MODELS
    }
    # Transformers has no MiMo, which is Qwen 2 with one more layer: tests/engine/test_mtp_drafts.py compares that.
    assert {family.name for family in FAMILIES} - {"mimo"} <= compared
