"""The documentation lists every family, and every family is compared with transformers."""

from __future__ import annotations

import re
from pathlib import Path

from gguf import MODEL_ARCH_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from penstock.models.decoder import Decoder
from penstock.models.families import FAMILIES
from penstock.models.mmproj import PROJECTORS
from penstock.models.vision_load import FAMILIES as VISION_FAMILIES
from tests.models.checkpoints import MODELS
from tests.models.gguf_files import ARCHITECTURES, NEWER_NAMES, SAME_LAYERS, TEXT_PARTS
from tests.models.tiny_families import TINY

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "models.md"


def gguf_names_in_tests() -> dict[str, str]:
    """Return the architecture in the GGUF files that tests write of each family."""
    return {
        model_type.removesuffix("_text"): NEWER_NAMES.get(model_type, MODEL_ARCH_NAMES[architecture])
        for model_type, architecture in ARCHITECTURES.items()
    }


def row(family: type[Decoder]) -> str:
    """Return the row of a family. Files of some families name another one, which reads them."""
    classes = [name for name in family.huggingface_names if not name.islower()]
    names = family.gguf_names or [*filter(None, [gguf_names_in_tests().get(family.name)])]
    gguf = ", ".join(f"`{name}`" for name in names)
    return f"| {', '.join(f'`{name}`' for name in classes)} | {gguf or '–'} |"


def test_the_page_lists_every_family() -> None:
    """A missing row is printed as it should stand in the page."""
    page = PAGE.read_text()
    assert not [row(family) for family in FAMILIES if row(family) not in page]


def test_the_page_of_images_lists_every_other_class() -> None:
    """Every vision-language class of transformers either sees images or is named among those that do not."""
    page = (DOCS / "images.md").read_text()
    named = set(
        re.findall(r"\w+", page.partition("### Classes without images")[2].partition("`python -m")[0])
    )
    known = {_short(name) for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    seeing = {_short(name) for name in VISION_FAMILIES}
    assert not seeing & named
    assert not known - seeing - named


def test_the_page_of_images_lists_every_projector_of_gguf_files() -> None:
    page = (DOCS / "images.md").read_text()
    assert not [name for name in PROJECTORS if f"`{name}`" not in page.partition("### GGUF")[2]]


def _short(name: str) -> str:
    return re.sub(r"_?For(ConditionalGeneration|CausalLM|BlockDiffusion|\w+Text2Text)$", "", name)


def test_every_family_is_compared_with_transformers() -> None:
    compared = {tiny.model_type.removesuffix("_text") for tiny in TINY.values()} | {
        name.replace("-", "_") for name in MODELS
    }
    # Transformers has no MiMo, which is Qwen 2 with one more layer: tests/engine/test_mtp_drafts.py compares that.
    # Nor has it those that test_published.py compares with Llama, Granite and the text model of DeepSeek-OCR 2.
    elsewhere = {"mimo", "internlm2", "internlm3", "exaone", "minicpm", "deepseek"}
    assert {family.name for family in FAMILIES} - elsewhere <= compared


def test_every_architecture_in_gguf_is_compared_with_transformers() -> None:
    read = {name for family in FAMILIES for name in (*family.gguf_names, *family.gguf_mixtures)}
    assert read <= {*gguf_names_in_tests().values(), *TEXT_PARTS, *SAME_LAYERS}
