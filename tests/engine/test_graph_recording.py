"""Recording of CUDA graphs, as far as it can be tested without a GPU."""

from __future__ import annotations

import gc

from penstock.engine.graphs import no_garbage_collection


def test_the_garbage_collector_waits_for_a_recording() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
