"""Prefixes that clients asked to keep: a copy on another replica is read, and not paid for twice."""

from __future__ import annotations

from random import Random

import msgspec

from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.messages import KeptEntry, KVStored
from penstock.core.plan import CacheUse, TokenEvent
from penstock.core.request import CacheBreakpoint, FinishReason, ImageInput, Request, SamplingParams
from penstock.dispatch import Deliver, DispatchConfig, Dispatcher, FleetStatus, ReplicaStatus, Send
from penstock.dispatch.kept import KeptPrefixes
from penstock.router import Replica, ReplicaState

PROMPT = tuple(range(100))


def request(*ends: int, tokens: tuple[int, ...] = PROMPT, ttl_s: float = 300.0, **fields: object) -> Request:
    marks = tuple(CacheBreakpoint(end, ttl_s) for end in ends)
    return Request(
        id="r",
        prompt_token_ids=tokens,
        sampling=SamplingParams(max_tokens=1),
        cache_breakpoints=marks,
        **fields,  # type: ignore[arg-type]
    )


def told(
    kept: KeptPrefixes, asked: Request, replica: str, read: int, *written: int, at: float = 0.0
) -> tuple[int, tuple[int, ...], int | None]:
    event = TokenEvent("r", (1,), num_cached_tokens=read, cache_use=CacheUse(read, written))
    seen = kept.settled(asked, replica, event, at)
    assert seen.cache_use is not None
    return seen.cache_use.read_tokens, seen.cache_use.written_tokens, seen.num_cached_tokens


def test_a_copy_on_another_replica_is_a_read() -> None:
    kept = KeptPrefixes()
    assert told(kept, request(66), "a", 0, 64) == (0, (64,), 0)
    assert told(kept, request(66), "b", 0, 64) == (64, (0,), 64)
    assert told(kept, request(66), "b", 64, 0) == (64, (0,), 64)


def test_what_a_replica_says_of_its_own_entries_stands() -> None:
    kept = KeptPrefixes()
    told(kept, request(66), "a", 0, 64)
    assert told(kept, request(66), "a", 0, 64, at=1.0) == (0, (64,), 0), "it had to give the entry up"


def test_only_what_was_kept_is_read_and_the_rest_is_written() -> None:
    kept = KeptPrefixes()
    told(kept, request(34), "a", 0, 32)
    longer = request(66)
    longer = msgspec.structs.replace(longer, cache_breakpoints=(CacheBreakpoint(66, 300.0, (34,)),))
    assert told(kept, longer, "b", 0, 64) == (32, (32,), 32)
    assert told(kept, request(34, 66, 98), "c", 0, 32, 32, 32) == (64, (0, 0, 32), 64)
    assert told(kept, request(34, 66), "d", 32, 0, 32) == (64, (0, 0), 64)


def test_another_prompt_tenant_salt_or_model_is_another_prefix() -> None:
    kept = KeptPrefixes()
    told(kept, request(66), "a", 0, 64)
    for other in (
        request(66, tokens=(7, *PROMPT[1:])),
        request(66, tenant="other"),
        request(66, cache_salt="tools"),
        request(66, model="other"),
    ):
        assert told(kept, other, "b", 0, 64) == (0, (64,), 0)
    assert told(kept, request(66, tokens=(*PROMPT[:66], 9, 9)), "c", 0, 64) == (64, (0,), 64)


def test_prompts_whose_images_differ_are_different() -> None:
    def with_image(digest: bytes) -> Request:
        return request(66, images=(ImageInput(start=4, num_tokens=8, digest=digest),))

    kept = KeptPrefixes()
    told(kept, with_image(b"x" * 32), "a", 0, 64)
    assert told(kept, with_image(b"y" * 32), "b", 0, 64) == (0, (64,), 0)
    assert told(kept, with_image(b"x" * 32), "c", 0, 64) == (64, (0,), 64)


def test_a_promise_ends_and_reads_prolong_it() -> None:
    kept = KeptPrefixes()
    told(kept, request(66), "a", 0, 64, at=0.0)
    told(kept, request(66), "a", 64, 0, at=200.0)
    assert told(kept, request(66), "b", 0, 64, at=450.0) == (64, (0,), 64)
    assert told(kept, request(66), "c", 0, 64, at=750.0) == (0, (64,), 0)


def test_a_prefix_that_was_too_short_to_keep_promises_nothing() -> None:
    kept = KeptPrefixes()
    told(kept, request(10, 66), "a", 0, 0, 0)
    assert told(kept, request(10, 66), "b", 0, 0, 64) == (0, (0, 64), 0)


def entry(num_tokens: int = 64, left_s: float = 300.0, num_blocks: int = 4) -> KeptEntry:
    """The entry that a replica tells of after `request(66)`, through whichever gateway."""
    return KeptEntry(chain_hashes(root_hash(""), PROMPT[:num_tokens], 16)[-1], num_blocks, left_s)


def test_a_copy_of_what_another_gateway_had_kept_is_a_read() -> None:
    kept = KeptPrefixes()
    kept.told("", "a", [entry()], 0.0)
    assert told(kept, request(66), "b", 0, 64, at=1.0) == (64, (0,), 64)
    assert told(kept, request(66, 98), "c", 0, 64, 32, at=1.0) == (64, (0, 32), 64)
    assert told(kept, request(66, tenant="other"), "b", 0, 64, at=1.0) == (0, (64,), 0)
    assert told(kept, request(66, tokens=(7, *PROMPT[1:])), "b", 0, 64, at=1.0) == (0, (64,), 0)


def test_a_replica_of_another_model_tells_nothing() -> None:
    kept = KeptPrefixes()
    kept.told("other", "a", [entry()], 0.0)
    assert told(kept, request(66), "b", 0, 64, at=1.0) == (0, (64,), 0)


def test_a_write_stays_a_write_when_its_own_news_comes_first() -> None:
    kept = KeptPrefixes()
    kept.told("", "b", [entry()], 1.5)
    assert told(kept, request(66), "b", 0, 64, at=1.0) == (0, (64,), 0)


def test_a_replica_that_told_of_an_entry_and_gave_it_up_writes_again() -> None:
    kept = KeptPrefixes()
    kept.told("", "a", [entry()], 0.0)
    kept.told("", "b", [entry()], 0.0)
    assert told(kept, request(66), "b", 0, 64, at=1.0) == (0, (64,), 0)


def test_a_told_entry_ends_unless_its_replica_prolongs_it() -> None:
    kept = KeptPrefixes()
    kept.told("", "a", [entry()], 0.0)
    kept.told("", "b", [entry()], 0.0)
    assert told(kept, request(66), "c", 0, 64, at=300.0) == (0, (64,), 0)
    kept.told("", "a", [entry()], 200.0)
    # The entry of `b` has ended, so `b` has not given anything up.
    assert told(kept, request(66), "b", 0, 64, at=301.0) == (64, (0,), 64)


def test_an_entry_for_which_there_was_no_room_counts_as_far_as_it_is_kept() -> None:
    kept = KeptPrefixes()
    kept.told("", "a", [entry(num_blocks=1)], 0.0)
    assert told(kept, request(66), "b", 0, 64, at=1.0) == (16, (48,), 16)


def test_memory_is_bounded() -> None:
    kept = KeptPrefixes(max_entries=3)
    for number in range(10):
        told(kept, request(66, tokens=(number, *PROMPT)), "a", 0, 64)
    assert len(kept._entries) == 3
    for number in range(10):
        kept.told("", "a", [KeptEntry(bytes([number]), 1, 300.0)], 0.0)
    assert len(kept._told) == 3


def test_the_dispatcher_tells_clients_of_reads() -> None:
    dispatcher = Dispatcher(DispatchConfig(routing_policy="round-robin"), Random(0), 0.0)
    replicas = tuple(
        ReplicaStatus(replica=Replica(id=name, models=frozenset({"m"}), state=ReplicaState.READY), model="m")
        for name in ("a", "b")
    )
    dispatcher.update(FleetStatus(replicas=replicas), 0.0)
    seen, used = [], set()
    for number in range(2):
        asked = msgspec.structs.replace(request(66, model="m"), id=f"r{number}")
        (send,) = (action for action in dispatcher.add(asked, 1.0) if isinstance(action, Send))
        used.add(send.replica_id)
        event = TokenEvent(
            asked.id, (1,), finish_reason=FinishReason.STOP, num_cached_tokens=0, cache_use=CacheUse(0, (64,))
        )
        for action in dispatcher.news(send.replica_id, [event], 2.0):
            if isinstance(action, Deliver):
                seen += [each.cache_use for each in action.events]
    assert used == {"a", "b"}
    assert seen == [CacheUse(0, (64,)), CacheUse(64, (0,))]


def test_the_dispatcher_hears_from_replicas_what_other_gateways_had_kept() -> None:
    dispatcher = Dispatcher(DispatchConfig(routing_policy="round-robin"), Random(0), 0.0)
    replicas = tuple(
        ReplicaStatus(replica=Replica(id=name, models=frozenset({"m"}), state=ReplicaState.READY), model="m")
        for name in ("a", "b")
    )
    dispatcher.update(FleetStatus(replicas=replicas, models={"m": 16}), 0.0)
    dispatcher.kv_events("a", (KVStored(0, (), b"", (entry(),)),), 0.0)
    seen = {}
    for number in range(2):
        asked = msgspec.structs.replace(request(66, model="m"), id=f"r{number}")
        (send,) = (action for action in dispatcher.add(asked, 1.0) if isinstance(action, Send))
        event = TokenEvent(asked.id, (1,), num_cached_tokens=0, cache_use=CacheUse(0, (64,)))
        (deliver,) = (
            action for action in dispatcher.news(send.replica_id, [event], 2.0) if isinstance(action, Deliver)
        )
        seen[send.replica_id] = deliver.events[0].cache_use
    assert seen == {"a": CacheUse(0, (64,)), "b": CacheUse(64, (0,))}, "`a` had to give it up"
