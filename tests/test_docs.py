"""The pages name only source files and links that exist, and list every file of the rooms that they describe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = [  # page and folder
    ("anthropic", "api/anthropic"),
    ("batches", "gateway/batches"),
    ("bench", "bench"),
    ("cli", "cli"),
    ("cli", "serve"),
    ("control", "control"),
    ("disaggregation", "engine/transfer"),
    ("dispatch", "dispatch"),
    ("engine", "engine"),
    ("gateway", "gateway"),
    ("kernels", "kernels/triton"),
    ("keys", "gateway/tenants"),
    ("kvcache", "kvcache"),
    ("limits", "gateway/ratelimits"),
    ("ollama", "api/ollama"),
    ("openai", "api/openai"),
    ("parallelism", "engine/parallel"),
    ("replies", "gateway/reuse"),
    ("router", "router"),
    ("scheduler", "scheduler"),
    ("simulator", "simulator"),
    ("store", "gateway/store"),
    ("usage", "gateway/ledger"),
]
_SOURCE = re.compile(r"`([\w./]+\.(?:py|cpp|h|js|lua))`")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)")


def source_names() -> Iterator[str]:
    for folder in ("penstock", "tests", "bench", "deploy"):
        for _, _, names in os.walk(ROOT / folder):
            yield from names
    yield from (path.name for path in ROOT.iterdir())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_source_files_that_pages_name_exist() -> None:
    known = set(source_names())
    named = {(page.name, name) for page in PAGES for name in _SOURCE.findall(page.read_text())}
    assert sorted(each for each in named if os.path.basename(each[1]) not in known) == []


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for target, anchor in _LINK.findall(page.read_text()):
            path = page.parent / target
            is_known = path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))
            if "://" not in target and not is_known:
                lost.append((page.name, target, anchor))
    assert lost == []


@pytest.mark.parametrize("room", ["cli", "serve", "triton"])
def test_a_table_of_a_folder_names_only_its_files(room: str) -> None:
    [folder] = [path for path in (ROOT / "penstock").rglob(room) if path.is_dir()]
    for page in PAGES:
        for table in re.findall(
            rf"\| file (?:of|in) `{room}/` \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text()
        ):
            first_cells = " ".join(row.split("|")[1] for row in table.splitlines())
            assert [name for name in _SOURCE.findall(first_cells) if not (folder / name).exists()] == []


@pytest.mark.parametrize(("page", "room"), ROOMS)
def test_a_page_lists_the_files_of_its_room(page: str, room: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    files = {path.name for path in (ROOT / "penstock" / room).glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in files if f"{name}`" not in text) == []
