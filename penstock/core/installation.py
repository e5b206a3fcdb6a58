"""The commands that install more of Penstock, built from the metadata of the installed distribution.

The distribution is not called `penstock` on PyPI: another project has that name. A hint that guesses the name would
fetch that project.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

_ENTRY_POINT = "penstock.main:main"  # only the distribution of this package installs it
_PUBLISHED_NAME = "penstock-llm"  # for a copy of the sources that was never installed


def install_command(extra: str) -> str:
    """Return the command that adds an optional extra to this installation."""
    return f"pip install {_requirement(_distribution(), extra)}"


def reinstall_command() -> str:
    """Return the command that builds and installs this distribution again, without its dependencies."""
    return f"pip install --force-reinstall --no-deps {_requirement(_distribution(), None)}"


def _distribution() -> metadata.Distribution | None:
    ours = [
        distribution
        for distribution in metadata.distributions()
        if any(entry.value == _ENTRY_POINT for entry in distribution.entry_points)
    ]
    # A source checkout with build metadata may come first on the path; the installed distribution knows its origin.
    return max(ours, key=lambda distribution: bool(_origin(distribution)), default=None)


def _requirement(distribution: metadata.Distribution | None, extra: str | None) -> str:
    """Return the argument for pip by which it finds the distribution again: in the index, a folder or a URL."""
    extras = f"[{extra}]" if extra else ""
    if distribution is None:
        return shlex.quote(f"{_PUBLISHED_NAME}{extras}")
    name = distribution.metadata["Name"]
    origin = _origin(distribution)
    url = origin.get("url", "")
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{editable}{shlex.quote(unquote(urlsplit(url).path) + extras)}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs.get('requested_revision') or vcs['commit_id']}"
    return shlex.quote(f"{name}{extras} @ {url}" if url else f"{name}{extras}")


def _origin(distribution: metadata.Distribution) -> dict[str, Any]:
    """Return the distribution's direct_url.json; empty for a distribution from an index."""
    text = distribution.read_text("direct_url.json")
    return dict(json.loads(text)) if text else {}
