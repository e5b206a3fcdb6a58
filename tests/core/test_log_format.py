"""Lines of the log begin with the same words in all processes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from penstock.cli.console import configure_logging
from penstock.core.log_format import set_up_logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("process", ["command", "engine"])
def test_a_line_has_a_day_a_time_and_a_level(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], process: str
) -> None:
    root.handlers[:] = []  # also those of pytest, which a process does not have
    if process == "command":
        configure_logging(debug=False)
    else:
        set_up_logs(process, "text", "INFO")
    logging.getLogger("penstock").error("the disk is full")
    line = capsys.readouterr().err
    origin = "engine: " if process == "engine" else ""
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d ERROR {origin}the disk is full\n", line)
