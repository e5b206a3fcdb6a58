"""The pages name only source files and links that exist, and list every file of the rooms that they describe."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = {
    "control": "control",
    "dispatch": "dispatch",
    "kvcache": "kvcache",
    "replies": "gateway/reuse",
    "router": "router",
    "scheduler": "scheduler",
    "simulator": "simulator",
    "store": "gateway/store",
}
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


@pytest.mark.parametrize(("page", "room"), ROOMS.items())
def test_a_page_lists_the_files_of_its_room(page: str, room: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    files = {path.name for path in (ROOT / "penstock" / room).glob("*.py")} - {"__init__.py"}
    assert sorted(name for name in files if f"`{name}`" not in text) == []
