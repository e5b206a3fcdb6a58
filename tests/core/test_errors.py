"""Errors that cross a process boundary."""

from __future__ import annotations

import pytest

from penstock.core.errors import EngineUnavailable, InvalidRequest, PenstockError, error_from_code


@pytest.mark.parametrize("kind", [InvalidRequest, EngineUnavailable])
def test_an_error_is_rebuilt_from_its_code(kind: type[PenstockError]) -> None:
    rebuilt = error_from_code(kind.code, "A sentence.", retry_after_s=2.0)
    assert type(rebuilt) is kind
    assert (rebuilt.message, rebuilt.retry_after_s) == ("A sentence.", 2.0)
    assert type(error_from_code("unknown", "A sentence.")) is PenstockError


def test_a_kind_without_a_code_does_not_take_the_place_of_the_one_above() -> None:
    class OfOneRoom(InvalidRequest):
        def __init__(self, number: int) -> None:
            super().__init__(f"Line {number}.")

    assert OfOneRoom.code == InvalidRequest.code
    assert type(error_from_code(InvalidRequest.code, "A sentence.")) is InvalidRequest
