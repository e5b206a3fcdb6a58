"""Workers take whole files of tests. Every result is reported once, also of a test whose worker dies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.workers import Workers

def pytest_addoption(parser):
    parser.addoption("--workers", type=int)

def pytest_runtestloop(session):
    workers = session.config.option.workers
    return Workers(session, workers, ("test_a.py", "test_b.py"), waits=lambda file: file == "test_c.py").run()
"""
FIXTURE = """
import os, pytest, warnings
from pathlib import Path

@pytest.fixture(scope="module", autouse=True)
def told():
    yield
    print(f"ended {__name__} in {os.getpid()}", file=open(Path(__file__).parent / "told", "a"))
"""
FILES = {
    "test_a.py": """
def test_passes(tmp_path): print("quiet"); assert "worker" in str(tmp_path)
def test_fails(): print("said on the way"); assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): ...
""",
    "test_b.py": "def test_warns(): warnings.warn('mind the gap')",
    "test_c.py": """
def test_before(): ...
def test_dies(): os._exit(7)
def test_after(): ...
""",
    "test_d.py": "@pytest.mark.parametrize('x', range(20))\ndef test_many(x): ...",
}


def run(folder: Path, *arguments: str) -> tuple[str, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, content in FILES.items():
        (folder / name).write_text(FIXTURE + content)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", *arguments, "."],
        cwd=folder,
        # Plugins of installed packages take most of the time of a start.
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = folder / "told"
    return done.stdout, told.read_text() if told.exists() else ""


def test_every_result_is_reported_once(tmp_path: Path) -> None:
    output, told = run(tmp_path, "--workers", "2")
    assert "2 failed, 24 passed, 1 skipped, 1 warning" in output
    assert "said on the way" in output
    assert "quiet" not in output
    assert "UserWarning: mind the gap" in output
    assert "the worker ended with code 7" in output
    ended = dict(re.findall(r"ended (\w+) in (\d+)", told))
    assert set(ended) == {
        "test_a",
        "test_b",
        "test_c",
        "test_d",
    }  # another worker took the rest of the third file
    assert ended["test_a"] == ended["test_b"]
    assert str(os.getpid()) not in ended.values()


def test_the_first_failure_ends_all_workers(tmp_path: Path) -> None:
    output, told = run(tmp_path, "--workers", "1", "-x")
    assert "1 failed, 1 passed" in output
    assert "stopping after 1 failures" in output
    assert told.startswith("ended test_a in ")  # with its fixtures


def test_only_every_second_worker_begins_with_files_that_wait(tmp_path: Path) -> None:
    _, told = run(tmp_path, "--workers", "1")
    assert re.findall(r"ended test_(\w)", told) == ["a", "b", "d", "c"]
    (tmp_path / "told").unlink()
    _, told = run(tmp_path, "--workers", "2")
    ended = dict(re.findall(r"ended test_(\w) in (\d+)", told))
    assert ended["a"] == ended["b"] != ended["c"]
