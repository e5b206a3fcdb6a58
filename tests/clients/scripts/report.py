"""What scripts of clients have in common: the server's address, and one JSON line per capability."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BASE_URL = os.environ["BASE_URL"]
API_KEY = os.environ["API_KEY"]
MODEL = os.environ["MODEL"]


def report(capability: str, ok: bool | None, note: str = "") -> None:
    print(json.dumps({"capability": capability, "ok": ok, "note": note}), flush=True)


@contextmanager
def capability(name: str, note: str = "") -> Iterator[None]:
    """Report that the block works, or the exception that it raises. The script goes on after an exception."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report(name, False, f"{type(error).__name__}: {error}"[:500])
    else:
        report(name, True, note)


def status_of(call: Callable[[], object]) -> int | None:
    """The HTTP status in the exception that a call raises; None where nothing is raised."""
    try:
        call()
    except Exception as error:
        return getattr(error, "status_code", None) or getattr(error, "status", None)
    return None
