"""The documentation lists every family, and every family is compared with transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from penstock.models.families import FAMILIES
from penstock.models.mmproj import PROJECTORS
from penstock.models.vision_load import FAMILIES as VISION_FAMILIES
from tests.models.checkpoints import MODELS
from tests.models.family_table import (
    FAILED,
    NONE,
    PAGE,
    FamilyTable,
    classes,
    gguf,
    gguf_names_in_tests,
    rows,
)
from tests.models.gguf_files import SAME_LAYERS, TEXT_PARTS
from tests.models.test_published import RENAMED
from tests.models.tiny_families import TINY

DOCS = PAGE.parent


def test_the_page_lists_every_family() -> None:
    """`python -m pytest --write-table` with the tests that docs/models.md names adds what is missing."""
    table = rows()
    assert not [classes(family) for family in FAMILIES if classes(family) not in table]
    assert len(table) == len(FAMILIES)
    assert not [family.name for family in FAMILIES if table[classes(family)]["GGUF"] != gguf(family)]
    assert not [name for name, cells in table.items() for text in cells.values() if text in ("", FAILED)]


def report(outcome: Any, *cells: tuple[str, str, str], when: Any = "call") -> pytest.TestReport:
    properties = [("cell", cell) for cell in cells]
    return pytest.TestReport("t", ("t.py", 1, "t"), {}, outcome, None, when, user_properties=properties)


def test_tests_fill_the_table(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(PAGE.read_text())
    llama, gpt2 = "`LlamaForCausalLM`", "`GPT2LMHeadModel`"
    table = FamilyTable(page)
    table.pytest_runtest_logreport(report("passed", ("llama", "images", "✓"), ("*", "tools", "in words")))
    table.pytest_runtest_logreport(report("failed", ("gpt2", "TP", "✓")))
    table.pytest_runtest_logreport(report("passed", ("gpt2", "TP", "✓")))
    table.pytest_runtest_logreport(report("skipped", ("gpt2", "GGUF", "✓"), ("llama", "images", "✓")))
    for name in ("hermes", "llama3_json"):
        table.pytest_runtest_logreport(report("passed", ("llama", "tools", name)))
    before = rows(page)
    table.pytest_sessionfinish()
    after = rows(page)
    assert list(after) == list(before)
    assert after[llama] == before[llama] | {"images": "✓", "tools": "hermes, llama3_json"}
    assert after[gpt2] == before[gpt2] | {"TP": FAILED, "GGUF": NONE, "tools": "in words"}
    written = page.read_text()
    FamilyTable(page).pytest_sessionfinish()
    assert page.read_text() == written


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
    assert {family.name for family in FAMILIES} - {*RENAMED} <= compared


def test_every_architecture_in_gguf_is_compared_with_transformers() -> None:
    read = {name for family in FAMILIES for name in (*family.gguf_names, *family.gguf_mixtures)}
    assert read <= {*gguf_names_in_tests().values(), *TEXT_PARTS, *SAME_LAYERS}
