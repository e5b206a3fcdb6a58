"""A dead holder of the lease is recognised on its own machine, and nobody else is taken for dead."""

from __future__ import annotations

import subprocess
import sys

from penstock.gateway.batches.holder import is_dead, new_holder

_MAKE = "from penstock.gateway.batches.holder import new_holder; print(new_holder())"


def test_dead_and_alive() -> None:
    mine = new_holder()
    assert mine != new_holder()
    assert not is_dead(mine)
    ended = subprocess.run([sys.executable, "-c", _MAKE], capture_output=True, check=True, text=True)
    holder = ended.stdout.strip()
    assert is_dead(holder)
    assert not is_dead("0" + holder[1:] if holder[0] != "0" else "1" + holder[1:])  # of another machine
    assert len(mine) <= 64


def test_other_names() -> None:
    assert not any(map(is_dead, ("", "a", "a:b", "a:b:c", f"{new_holder().split(':')[0]}::x")))
