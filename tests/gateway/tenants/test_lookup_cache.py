"""What is remembered, for how long, and what a flood of strangers cannot do."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import Overloaded, StoreUnavailable
from penstock.gateway.tenants.keyring import MAX_LOADING, Loaded, LookupCache


class Source:
    """A database with values, which counts how often it is asked and can be gone or slow."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.revision = 1
        self.num_asked = 0
        self.is_gone = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def load(self, name: str) -> Loaded[str]:
        self.num_asked += 1
        answer = Loaded(self.values.get(name), self.revision)
        await self.may_answer.wait()
        if self.is_gone:
            raise StoreUnavailable("gone")
        return answer


def recall_of(
    source: Source, clock: VirtualClock | None = None, *, max_entries: int = 100
) -> LookupCache[str]:
    return LookupCache(source.load, clock or VirtualClock(), keep_s=10, max_entries=max_entries)


async def test_an_answer_is_kept_for_a_while_found_or_not() -> None:
    source, clock = Source(), VirtualClock()
    source.values["a"] = "A"
    recall = recall_of(source, clock)
    for _ in range(3):
        assert (await recall.get("a"), await recall.get("b")) == ("A", None)
    assert source.num_asked == 2
    clock.advance(10)
    assert await recall.get("a") == "A"
    assert source.num_asked == 3


async def test_those_who_ask_at_once_share_one_lookup() -> None:
    source = Source()
    source.values["a"] = "A"
    recall = recall_of(source)
    assert await asyncio.gather(*(recall.get("a") for _ in range(50))) == ["A"] * 50
    assert source.num_asked == 1


async def test_one_who_gives_up_does_not_disturb_the_others() -> None:
    source = Source()
    source.values["a"] = "A"
    source.may_answer.clear()
    recall = recall_of(source)
    impatient, patient = asyncio.create_task(recall.get("a")), asyncio.create_task(recall.get("a"))
    await asyncio.sleep(0)
    impatient.cancel()
    source.may_answer.set()
    assert await patient == "A"


async def test_what_changed_is_asked_again_and_what_was_absent_too() -> None:
    source = Source()
    source.values |= {"a": "A", "b": "B"}
    recall = recall_of(source)
    assert [await recall.get(name) for name in "abc"] == ["A", "B", None]
    source.values |= {"a": "A2", "b": "B2", "c": "C"}
    source.revision = 2
    recall.forget(["a"], 2)
    assert [await recall.get(name) for name in "abc"] == ["A2", "B", "C"]
    recall.forget(None, 2)
    assert await recall.get("b") == "B2"


async def test_an_answer_older_than_a_known_change_is_not_kept() -> None:
    source = Source()
    source.values["a"] = "before"
    source.may_answer.clear()
    recall = recall_of(source)
    asking = asyncio.create_task(recall.get("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    source.values["a"] = "after"
    source.revision = 2
    recall.forget(["a"], 2)
    source.may_answer.set()
    assert await asking == "before"
    assert await recall.get("a") == "after"


async def test_strangers_cannot_push_out_those_who_are_known() -> None:
    source = Source()
    source.values["a"] = "A"
    recall = recall_of(source, max_entries=5)
    await recall.get("a")
    for number in range(50):
        assert await recall.get(f"stranger {number}") is None
    assert len(recall) == 6
    asked = source.num_asked
    assert await recall.get("a") == "A"
    assert source.num_asked == asked


async def test_the_longest_unused_goes_first() -> None:
    source = Source()
    source.values |= {name: name for name in "abc"}
    recall = recall_of(source, max_entries=2)
    for name in "abac":
        await recall.get(name)
    asked = source.num_asked
    await recall.get("a")
    assert source.num_asked == asked
    await recall.get("b")
    assert source.num_asked == asked + 1


async def test_a_flood_of_lookups_is_refused_rather_than_queued() -> None:
    source = Source()
    source.may_answer.clear()
    recall = recall_of(source, max_entries=1000)
    flood = [asyncio.create_task(recall.get(f"stranger {number}")) for number in range(MAX_LOADING + 10)]
    await asyncio.sleep(0)
    source.may_answer.set()
    answers = await asyncio.gather(*flood, return_exceptions=True)
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 10
    assert await recall.get("stranger again") is None


async def test_in_an_outage_the_known_stay_known_and_strangers_are_not_judged() -> None:
    source, clock = Source(), VirtualClock()
    source.values["a"] = "A"
    recall = recall_of(source, clock)
    await recall.get("a")
    await recall.get("b")
    source.is_gone = True
    clock.advance(11)
    assert await recall.get("a") == "A"
    with pytest.raises(StoreUnavailable):
        await recall.get("b")
