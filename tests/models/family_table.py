"""The table of families in docs/models.md. Tests name the cells that they fill (the fixture `shows`), and
`pytest --write-table` writes the cells of the tests that ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from gguf import MODEL_ARCH_NAMES

from penstock.models.decoder import Decoder
from penstock.models.families import FAMILIES
from tests.models.gguf_files import ARCHITECTURES, NEWER_NAMES

Shows = Callable[..., None]

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN = "<!-- pytest --write-table: begin -->"
END = "<!-- pytest --write-table: end -->"
CLASSES = "class in `config.json`"
COLUMNS = ("GGUF", "folder", "TP", "LoRA", "int8", "images", "tools", "reasoning")
REST = "*"  # the family of a cell of all families that no test names
NONE, FAILED = "–", "✗"


def gguf_names_in_tests() -> dict[str, str]:
    """Return the architecture in the GGUF files that tests write of each family."""
    return {
        model_type.removesuffix("_text"): NEWER_NAMES.get(model_type, MODEL_ARCH_NAMES[architecture])
        for model_type, architecture in ARCHITECTURES.items()
    }


def classes(family: type[Decoder]) -> str:
    return ", ".join(f"`{name}`" for name in family.huggingface_names if not name.islower())


def gguf(family: type[Decoder]) -> str:
    """Return the architectures in GGUF files that a family is. Files of some families name another one."""
    names = family.gguf_names or [*filter(None, [gguf_names_in_tests().get(family.name)])]
    return ", ".join(f"`{name}`" for name in names) or NONE


def rows(page: Path = PAGE) -> dict[str, dict[str, str]]:
    """Return the cells of the table on the page, by the classes of a family and by column."""
    lines = page.read_text().partition(BEGIN)[2].partition(END)[0].split("\n")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return {first: dict(zip(COLUMNS, rest, strict=True)) for first, *rest in cells}


class FamilyTable:
    """Collects the cells that tests fill, and writes them when the tests have ended. Other cells stay."""

    def __init__(self, page: Path = PAGE) -> None:
        self._page = page
        self._cells: dict[tuple[str, str], dict[str, None]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A cell says what all tests that fill it say, in their order; a skipped test says nothing."""
        if report.when == "call" or report.outcome == "failed":
            for name, value in report.user_properties:
                if name == "cell":
                    family, column, text = cast(tuple[str, str, str], value)
                    said = self._cells.setdefault((family, column), {})
                    if report.outcome != "skipped":
                        said[FAILED if report.outcome == "failed" else text] = None

    def pytest_sessionfinish(self) -> None:
        if self._cells:
            self.write()

    def write(self) -> None:
        before, rest = self._page.read_text().split(BEGIN)
        after = rest.split(END)[1]
        old = rows(self._page)
        families = {classes(family): family for family in FAMILIES}
        known = {name: families[name] for name in old if name in families}  # in the order of the page
        lines = [
            f"| {' | '.join([CLASSES, *COLUMNS])} |",
            "|---|---|" + ":-:|" * 5 + "---|---|",
            *(self._row(family, old.get(name, {})) for name, family in (known | families).items()),
        ]
        self._page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")

    def _row(self, family: type[Decoder], old: dict[str, str]) -> str:
        cells = [self._cell(family, column, old.get(column, NONE)) for column in COLUMNS]
        return f"| {' | '.join([classes(family), *cells])} |"

    def _cell(self, family: type[Decoder], column: str, old: str) -> str:
        said = self._cells.get((family.name, column), self._cells.get((REST, column)))
        if said is None:
            return old
        if FAILED in said or not said:
            return FAILED if said else NONE
        return gguf(family) if column == "GGUF" else ", ".join(said)
