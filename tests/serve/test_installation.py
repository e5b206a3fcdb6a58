"""Hints name the distribution that is installed, wherever it came from: `penstock` on PyPI is another project."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.core import machine
from penstock.core.machine import install_command, reinstall_command


def install(folder: Path, name: str, entry_point: str, origin: dict[str, object] | None) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[console_scripts]\npenstock = {entry_point}\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, ["our-name[otel]"]),
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, ["-e", "/src/a b[otel]"]),
        ({"url": "file:///src/penstock", "dir_info": {}}, ["/src/penstock[otel]"]),
        (
            {"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            ["our-name[otel] @ git+https://example.org/p.git@abc"],
        ),
        (
            {"url": "https://example.org/p.whl", "archive_info": {}},
            ["our-name[otel] @ https://example.org/p.whl"],
        ),
    ],
)
def test_an_extra_is_added_to_what_is_installed(monkeypatch, tmp_path, origin, expected) -> None:
    install(tmp_path, "penstock", "penstock.__main__:run", None)  # a stranger's package of the same name
    install(tmp_path, "our-name", "penstock.main:main", origin)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    words = shlex.split(install_command("otel"))
    assert words == ["pip", "install", *expected]
    assert "[otel]" not in reinstall_command()


def test_metadata_of_a_checkout_on_the_path_does_not_hide_where_the_installation_came_from(
    monkeypatch, tmp_path
) -> None:
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    checkout.mkdir()
    site.mkdir()
    install(checkout, "our-name", "penstock.main:main", None)
    install(site, "our-name", "penstock.main:main", {"url": "file:///src", "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "path", [str(checkout), str(site)])
    assert install_command("ray") == "pip install -e '/src[ray]'"


def test_sources_that_were_never_installed_name_the_published_distribution(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert install_command("ray") == "pip install 'penstock-llm[ray]'"


def test_the_published_name_is_the_one_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == machine._PUBLISHED_NAME
    assert project["scripts"] == {"penstock": machine._ENTRY_POINT}


def test_no_text_of_the_project_asks_pip_for_the_package_of_another_project() -> None:
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [
            "grep",
            "-rnE",
            r"pip install[^`]* '?penstock(\[|'|`|$| )",
            "README.md",
            "docs",
            "deploy",
            "penstock",
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""
