"""Which replica lends KV to which: the gateway's side of disaggregation, with replicas that are not there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import Member
from penstock.core.engine_config import CacheConfig, ModelConfig, ParallelConfig
from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.kv_transfer import KVSource
from penstock.core.messages import EngineStats, KVStored
from penstock.core.plan import TokenEvent
from penstock.core.request import Request
from penstock.dispatch import Role

from .fake_replicas import FakeReplica, make_request, member

PROMPT = bytes(range(200)) * 5


class LendingReplica(FakeReplica):
    """A fake that could lend KV, and remembers where it was told to get some."""

    def __init__(self, replica_id: str, *callbacks: Callable[..., None]) -> None:
        super().__init__(*callbacks)
        self.replica_id = replica_id
        self.sources: dict[str, KVSource | None] = {}

    def start(self) -> None:
        super().start()
        assert self.ready is not None
        self.ready = msgspec.structs.replace(
            self.ready, kv_endpoint=f"kv://{self.replica_id}", kv_bytes_per_token=20_000
        )

    def add(self, request: Request, *, kv_source: KVSource | None = None, **options: object) -> None:  # type: ignore[override]
        self.sources[request.id] = kv_source
        super().add(request, **options)  # type: ignore[arg-type]


class Rig:
    def __init__(self) -> None:
        self.replicas: dict[str, LendingReplica] = {}
        self.fleet = Fleet(connect=self._connect)
        self.num_asked = 0

    def _connect(self, member: Member, **callbacks: Callable[..., None]) -> LendingReplica:
        names = ("on_ready", "on_stats", "on_events", "on_kv_events")
        replica = LendingReplica(member.id, *(callbacks[name] for name in names))
        self.replicas[member.id] = replica
        return replica

    def join(self, *members: tuple[str, Role, str]) -> None:
        self.fleet.update([with_role(replica_id, role, revision) for replica_id, role, revision in members])
        self.join_again()

    def join_again(self) -> None:
        for replica in self.replicas.values():  # each computes a token in a millisecond
            for step in range(1, 40):
                tokens = 1000 if step % 2 else 10
                replica.tell_stats(
                    EngineStats(num_steps=step, step_tokens=tokens, step_s=0.01 + tokens * 1e-3)
                )

    def ask(self, prompt: bytes = PROMPT, **sampling: int) -> tuple[str, KVSource | None]:
        """Who serves it, and with whose KV."""
        self.num_asked += 1
        request = make_request(f"r{self.num_asked}", prompt=prompt)
        options = msgspec.structs.replace(request.sampling, **sampling)
        request = msgspec.structs.replace(request, sampling=options)
        self.fleet.add(request, timeout_s=None, on_event=ignore, on_error=fail)
        (server,) = [replica for replica in self.replicas.values() if request.id in replica.sources]
        return server.replica_id, server.sources[request.id]

    def cache(self, replica_id: str, prompt: bytes) -> None:
        hashes = chain_hashes(root_hash(""), tuple(prompt), 16)
        self.replicas[replica_id].tell_kv_events((KVStored(0, tuple(hashes), root_hash("")),))


def with_role(replica_id: str, role: Role, revision: str, weights: str = "") -> Member:
    """Weights are those of the revision unless they are named."""
    plain = member(replica_id, revision=revision)
    spec = msgspec.structs.replace(plain.spec, role=role, model_path=weights or revision)
    return msgspec.structs.replace(plain, spec=spec)


def ignore(event: TokenEvent) -> None:
    pass


def fail(error: Exception) -> None:
    raise error


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_long_prompts_go_by_way_of_prefill_replicas(rig: Rig) -> None:
    rig.join(("p", "prefill", "a"), ("d", "decode", "a"))
    assert rig.ask() == ("d", KVSource("kv://p"))
    assert rig.ask(PROMPT[:100]) == ("d", None), "a short one stays"
    rig.cache("d", PROMPT[::-1])
    assert rig.ask(PROMPT[::-1]) == ("d", None), "and one that is cached there"
    assert rig.fleet.dispatcher.kv_sources.chosen == {"prefill": 1, "here": 2}


async def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_where_it_is_served(
    rig: Rig,
) -> None:
    """KV of another replica comes without the logits of its tokens."""
    rig.join(("p", "prefill", "a"), ("d", "decode", "a"))
    assert rig.ask(prompt_logprobs=1) == ("d", None)
    assert rig.ask(PROMPT[::-1]) == ("d", KVSource("kv://p"))


async def test_replicas_of_other_weights_are_not_paired(rig: Rig) -> None:
    rig.join(("old", "prefill", "a"), ("d", "decode", "b"))
    assert rig.ask() == ("d", None)
    rig.join(("old", "prefill", "a"), ("new", "prefill", "b"), ("d", "decode", "b"))
    assert rig.ask(PROMPT[::-1]) == ("d", KVSource("kv://new"))


async def test_prompts_are_spread_over_prefill_replicas_and_count_there_until_the_first_token(
    rig: Rig,
) -> None:
    rig.join(("p1", "prefill", "a"), ("p2", "prefill", "a"), ("d", "decode", "a"))
    sources = {rig.ask(bytes([n]) * 1000)[1] for n in range(2)}
    assert sources == {KVSource("kv://p1"), KVSource("kv://p2")}
    router = rig.fleet.dispatcher.table.prefill_router
    loads = [router.load(replica_id) for replica_id in ("p1", "p2")]
    assert [load.own_requests for load in loads if load] == [1, 1]
    rig.replicas["d"].emit("r1", 1)
    rig.fleet.abort("r2")
    assert [load.own_requests for load in loads if load] == [0, 0]


async def test_a_prefill_replica_that_knows_the_prefix_is_preferred(rig: Rig) -> None:
    rig.join(("p1", "prefill", "a"), ("p2", "prefill", "a"), ("d", "decode", "a"))
    rig.cache("p2", PROMPT[:800])
    assert rig.ask() == ("d", KVSource("kv://p2"))


async def test_when_the_only_prefill_replica_goes_decoders_do_without(rig: Rig) -> None:
    rig.join(("p", "prefill", "a"), ("d", "decode", "a"))
    rig.fleet.update([with_role("d", "decode", "a")])
    assert rig.ask() == ("d", None)


async def test_a_prefix_is_fetched_from_the_replica_that_has_it(rig: Rig) -> None:
    """Its holder has so much to do that the request goes elsewhere, and the prefix goes with it."""
    rig.join(("busy", "both", "a"), ("free", "both", "a"))
    rig.cache("busy", PROMPT)
    rig.replicas["busy"].tell_stats(
        EngineStats(num_running=8, num_waiting=50, num_waiting_tokens=60_000, num_steps=99)
    )
    assert rig.ask() == ("free", KVSource("kv://busy", computes=False))


@pytest.mark.parametrize("role", ["both", "decode"])
async def test_a_replica_with_other_weights_at_the_same_path_lends_no_kv(
    rig: Rig, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings and a path are all that a revision stands for."""
    rig.join(("busy", "both" if role == "both" else "prefill", "a"), ("free", role, "a"))
    busy = rig.replicas["busy"]
    assert busy.ready is not None
    card = msgspec.structs.replace(busy.ready.model, weights_id="of another day")
    endpoint = {"kv_endpoint": "kv://busy", "kv_bytes_per_token": 20_000}
    busy.describe(card)
    busy.ready = msgspec.structs.replace(busy.ready, **endpoint)
    rig.join(("busy", "both" if role == "both" else "prefill", "a"), ("free", role, "a"))
    rig.cache("busy", PROMPT)
    busy.tell_stats(EngineStats(num_running=8, num_waiting=50, num_waiting_tokens=60_000, num_steps=99))
    assert rig.ask() == ("free", None)
    assert caplog.text.count("has other weights of") == 1


async def test_a_replica_changes_its_role_with_its_requests_underway(rig: Rig) -> None:
    rig.join(("p", "prefill", "a"), ("d1", "decode", "a"), ("d2", "decode", "a"))
    servers = {rig.ask(bytes([n]) * 1000)[0] for n in range(4)}
    assert servers == {"d1", "d2"}
    before = dict(rig.replicas)
    rig.fleet.update(
        [with_role(name, role, "a") for name, role in (("p", "decode"), ("d1", "decode"))]
        + [with_role("d2", "prefill", "a")]
    )
    assert rig.replicas == before, "no connection is made anew"
    assert not rig.fleet.verdicts, "no request is lost"
    server, source = rig.ask(bytes([9]) * 1000)
    assert server in ("p", "d1")
    assert source == KVSource("kv://d2")
    (of_d2,) = [name for name, source in before["d2"].sources.items()][:1]
    rig.replicas["d2"].emit(of_d2, 1)  # it still answers what it had
    assert not rig.fleet.verdicts


async def test_a_transfer_that_was_measured_to_be_slow_is_not_repeated(rig: Rig) -> None:
    rig.join(("busy", "both", "a"), ("free", "both", "a"))
    rig.cache("busy", PROMPT)
    rig.replicas["free"].tell_stats(
        EngineStats(num_steps=50, step_tokens=1000, step_s=1.01, kv_read_bytes=20_000, kv_read_s=2.0)
    )
    rig.replicas["busy"].tell_stats(
        EngineStats(num_running=8, num_waiting=50, num_waiting_tokens=60_000, num_steps=99)
    )
    assert rig.ask() == ("free", None)


async def test_a_prefill_replica_with_other_ranks_computes_where_the_revision_has_none(rig: Rig) -> None:
    """Its KV means the same. That of other weights does not."""

    def with_engine(of: Member, **settings: object) -> Member:
        engine = msgspec.structs.replace(of.spec.engine, **settings)
        return msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, engine=engine))

    decode = with_role("d", "decode", "a")
    wide = with_engine(
        with_role("wide", "prefill", "b", "a"), parallel=ParallelConfig(tensor_parallel_size=2)
    )
    other = with_engine(with_role("other", "prefill", "c", "a"), model=ModelConfig(model="other"))
    rounded = with_engine(with_role("rounded", "prefill", "e", "a"), cache=CacheConfig(kv_cache_dtype="int8"))
    rig.fleet.update([decode, other, rounded])
    rig.join_again()
    assert rig.ask() == ("d", None)
    rig.fleet.update([decode, other, rounded, wide])
    rig.join_again()
    assert rig.ask(PROMPT[9:]) == ("d", KVSource("kv://wide"))
    rig.fleet.update([decode, other, rounded, wide, with_role("own", "prefill", "a")])
    rig.join_again()
    assert [rig.ask(PROMPT[n:])[1] for n in range(1, 4)] == [KVSource("kv://own")] * 3, "of the same revision"
