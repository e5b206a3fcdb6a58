"""In processes of their own: the key is Triton's, for all that follows."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

KEY_OF = """
from importlib import metadata
from triton.runtime import cache
from penstock.engine.startup import know_compiler_by_its_wheel
{change}
own = cache.triton_key
known = know_compiler_by_its_wheel()
print(known, cache.triton_key is own, cache.get_cache_key.__globals__["triton_key"] is own)
if known:
    print(cache.triton_key())
"""


def _run(change: str = "") -> list[str]:
    script = KEY_OF.format(change=change)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_list_of_the_wheel_takes_the_place_of_all_files() -> None:
    import triton

    state, key = _run()
    assert state == "True False False"
    assert key.startswith(f"{triton.__version__}-")
    assert _run() == [state, key]


def test_another_list_is_another_compiler() -> None:
    change = """
read = metadata.PathDistribution.read_text
metadata.PathDistribution.read_text = lambda self, name: (read(self, name) or "") + "one more file"
"""
    assert _run(change)[1] != _run()[1]


@pytest.mark.parametrize(
    "change",
    [
        "metadata.PathDistribution.read_text = lambda self, name: None",
        "def missing(name): raise metadata.PackageNotFoundError\nmetadata.distribution = missing",
    ],
)
def test_without_a_wheel_triton_looks_for_itself(change: str) -> None:
    assert _run(change) == ["False True True"]
