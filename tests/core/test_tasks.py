"""Tasks in the background."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.tasks import running


async def test_work_that_fails_is_told_while_the_rest_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("lost")

    async def rest() -> None:
        async with running(fail()), asyncio.timeout(60):
            while "has ended for good" not in caplog.text:
                await asyncio.sleep(0.01)

    with pytest.raises(KeyError):
        await rest()
    assert "KeyError: 'lost'" in caplog.text


async def test_work_that_is_cancelled_or_done_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with running(asyncio.sleep(1000)), running(asyncio.sleep(0)):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert not caplog.text
