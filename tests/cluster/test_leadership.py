"""When a control process campaigns for the lead, and how long it keeps the lead."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cluster.host_record import HostRecord, JoinTokens, encode_record
from penstock.cluster.leadership import SERVING, Leadership, Serving, Superseded, Writer
from penstock.core.errors import ConfigError
from tests.cluster.memory_registry import MemoryRegistry

TOKENS = JoinTokens.parse("the token of this fleet which is long")
OTHERS = JoinTokens.parse("another token that is long enough")


class SlowRegistry(MemoryRegistry):
    """Answers `delay_s` after each question, by a clock of its own."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.now_s = 100.0
        self.leadership: Leadership | None = None
        self.epochs: list[int | None] = []  # of the candidate, when answers come

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        self.now_s += self.delay_s
        assert self.leadership is not None
        self.epochs.append(self.leadership.epoch)
        return await super().lead(candidate, lease_s, above)


async def publish(registry: MemoryRegistry, host: str, tokens: JoinTokens) -> None:
    await registry.publish(host, encode_record(HostRecord(host, ()), tokens), 60.0)


async def test_a_process_with_another_join_token_does_not_lead(caplog: pytest.LogCaptureFixture) -> None:
    """It would hold the lease for ever, and overwrite what leaders have written, but no host would follow."""
    registry = MemoryRegistry()
    await publish(registry, "north", TOKENS)
    stranger = Leadership(registry, "stranger", tokens=OTHERS)
    for _ in range(2):
        await stranger.try_once()
    assert stranger.epoch is None
    assert caplog.text.count("1 of the 1 hosts in the registry have another join token") == 1
    own = Leadership(registry, "own", tokens=TOKENS)
    await own.try_once()
    assert own.epoch == 1


async def test_a_leader_steps_down_when_most_hosts_have_another_join_token() -> None:
    registry = MemoryRegistry()
    stranger = Leadership(registry, "stranger", tokens=OTHERS)
    await stranger.try_once()
    assert stranger.epoch == 1, "nobody else is there yet"
    await publish(registry, "north", TOKENS)
    await stranger.try_once()
    assert stranger.epoch is None
    own = Leadership(registry, "own", tokens=TOKENS)
    await own.try_once()
    assert own.epoch == 2, "at once: the stranger has resigned"
    await publish(registry, "south", OTHERS)
    await own.try_once()
    assert own.epoch == 2, "one host in two with a wrong token ends no term"


async def obey(registry: MemoryRegistry, host: str, epoch: int) -> None:
    await registry.publish(host, encode_record(HostRecord(host, (), epoch=epoch), TOKENS), 60.0)


async def test_a_registry_that_loses_its_memory_with_the_leader_gives_no_number_twice() -> None:
    """Hosts and gateways would take no document of the next leader: its epoch is one that they know already."""
    registry, now_s = MemoryRegistry(), 100.0
    first = Leadership(registry, "first", tokens=TOKENS)
    await first.try_once()
    assert first.epoch == 1
    await obey(registry, "north", 1)
    standby = Leadership(registry, "standby", tokens=TOKENS)
    await standby.try_once()
    assert standby.epoch is None

    registry.__init__()  # type: ignore[misc]
    new = Leadership(registry, "new", tokens=TOKENS, hosts_return_s=4.0, now=lambda: now_s)
    await new.try_once()
    assert new.epoch is None, "it waits for hosts that may have outlived the registry"
    await standby.try_once()
    assert standby.epoch == 2, "it was told by the hosts before"
    await standby.give_up(2)

    registry.__init__()  # type: ignore[misc]
    await obey(registry, "north", 2)
    await new.try_once()
    assert new.epoch == 3


async def test_the_first_leader_of_an_empty_fleet_waits_a_moment() -> None:
    now_s = 100.0
    leadership = Leadership(MemoryRegistry(), "own", tokens=TOKENS, hosts_return_s=4.0, now=lambda: now_s)
    await leadership.try_once()
    assert leadership.epoch is None
    now_s = 104.0
    await leadership.try_once()
    assert leadership.epoch == 1


async def test_tokens_that_change_are_no_strangers() -> None:
    registry = MemoryRegistry()
    await publish(registry, "north", JoinTokens((*OTHERS.tokens, *TOKENS.tokens)))
    leadership = Leadership(registry, "own", tokens=JoinTokens((*TOKENS.tokens, *OTHERS.tokens)))
    await leadership.try_once()
    assert leadership.epoch == 1


async def test_a_registry_that_answers_slowly_costs_no_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer is part of the time between two renewals."""
    registry, sleep = SlowRegistry(1.5), asyncio.sleep

    async def pass_time(seconds: float) -> None:
        registry.now_s += seconds
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    registry.leadership = Leadership(registry, "own", lease_s=5.0, now=lambda: registry.now_s)
    async with registry.leadership.running():
        while len(registry.epochs) < 20:
            await sleep(0)
    assert registry.epochs == [None] + [1] * 19


async def test_an_error_that_nobody_foresaw_ends_no_campaign(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fleet would be without a leader as soon as the other candidates are gone, and no log would say why."""
    registry = MemoryRegistry()
    candidate = Leadership(registry, "candidate", lease_s=0.5)
    lead, num_failed = registry.lead, 0

    async def fail_once(name: str, lease_s: float, above: int) -> int | None:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 1:
            raise KeyError("unforeseen")
        return await lead(name, lease_s, above)

    monkeypatch.setattr(registry, "lead", fail_once)
    async with candidate.running():
        async with asyncio.timeout(60):
            await candidate.until_leads()
    assert "is asked for again" in caplog.text


async def test_a_lease_that_ended_is_not_said_to_be_anothers() -> None:
    now = 100.0
    leadership = Leadership(MemoryRegistry(), "own", lease_s=5.0, now=lambda: now)
    await leadership.try_once()
    now = 104.5
    with pytest.raises(Superseded, match="ended before the registry renewed it"):
        await Writer(MemoryRegistry(), TOKENS, leadership, 1).write(SERVING, Serving())


def test_a_token_with_a_comma_is_two() -> None:
    with pytest.raises(ConfigError, match="Commas separate tokens"):
        JoinTokens.parse("one long token with a, comma")
