"""Which revision answers a request, which are mirrored, and what is made of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.cluster import traffic
from penstock.cluster.control_messages import ActiveRelease
from penstock.cluster.replica import Member
from penstock.cluster.traffic import MAX_MIRRORED, ReleaseTraffic, is_dropped
from penstock.control.release import ReleaseConfig, ReleaseState, Stage
from penstock.core.errors import EngineUnavailable, InvalidRequest, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams
from penstock.dispatch import Attempt
from penstock.router import Replica, ReplicaState
from tests.cluster.control_stage import SPEC

CONFIG = ReleaseConfig(mirrored_share=0.5, canary_shares=(0.25,))


class FakeFleet:
    def __init__(self) -> None:
        self.members = [member("old", "v1"), member("new", "v2")]
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.failure: PenstockError | None = None

    def add(
        self,
        request: Request,
        *,
        timeout_s: float | None,
        on_event: Callable[[TokenEvent], None],
        on_error: Callable[[PenstockError], None],
    ) -> None:
        assert timeout_s is not None
        self.added.append(request)
        if self.failure is not None:
            on_error(self.failure)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def member(name: str, revision: str, state: ReplicaState = ReplicaState.READY) -> Member:
    replica = Replica(id=name, models=frozenset(("echo",)), revision=revision, state=state)
    return Member(replica=replica, spec=SPEC, endpoint="")


def request(request_id: str, *, temperature: float = 0.0, seed: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=4, temperature=temperature, seed=seed)
    return Request(id=request_id, prompt_token_ids=(1, 2), sampling=sampling)


def attempt(of: Request, revision: str, tokens: tuple[int, ...] = (), **changes: object) -> Attempt:
    values: dict[str, object] = {"ttft_s": 0.1, "itl_s": 0.01, "finish_reason": FinishReason.STOP} | changes
    return Attempt(request=of, replica_id="old", revision=revision, output_token_ids=tokens, **values)  # type: ignore[arg-type]


class Scene:
    def __init__(self, stage: Stage) -> None:
        self.fleet = FakeFleet()
        self.traffic = ReleaseTraffic(self.fleet, lambda: "echo")
        self.enter(stage, 1)

    def enter(self, stage: Stage, number: int) -> None:
        state = ReleaseState(stable="v1", candidate="v2", stage=stage, stage_number=number, since_s=0.0)
        self.traffic.follow([ActiveRelease(model="echo", state=state, config=CONFIG)])

    def mirrored(self) -> Request:
        """A request that was mirrored."""
        for number in range(100):
            self.traffic.arrived(request(f"m{number}"), 2)
            if self.fleet.added:
                return request(f"m{number}")
        raise AssertionError("none was mirrored")


@pytest.mark.parametrize(
    ("stage", "share"),
    [
        (Stage.WARMING, 0.0),
        (Stage.SHADOW, 0.0),
        (Stage.CANARY, 0.25),
        (Stage.LAME_DUCK, 1.0),
        (Stage.ROLLING_BACK, 0.0),
    ],
)
def test_each_stage_shares_requests_out(stage: Stage, share: float) -> None:
    scene = Scene(stage)
    chosen = Counter(scene.traffic.choose_revision(request(f"r{number}")) for number in range(2000))
    assert chosen["v2"] / 2000 == pytest.approx(share, abs=0.05)
    assert sum(chosen[name] for name in ("v1", "v2")) == 2000


def test_a_session_stays_with_its_revision() -> None:
    scene = Scene(Stage.CANARY)
    for session in range(20):
        turns = [replace(request(f"{session}-{turn}"), affinity_key=f"s{session}") for turn in range(5)]
        assert len({scene.traffic.choose_revision(turn) for turn in turns}) == 1


def test_without_a_release_anybody_answers() -> None:
    scene = Scene(Stage.CANARY)
    scene.traffic.follow(())
    assert scene.traffic.choose_revision(request("r")) is None


@pytest.mark.parametrize(("stage", "chosen"), [(Stage.SHADOW, "v1"), (Stage.ROLLING_BACK, "v2")])
def test_while_the_stable_revision_is_away_only_a_candidate_that_was_in_service_helps_out(
    stage: Stage, chosen: str
) -> None:
    scene = Scene(stage)
    scene.fleet.members[0] = member("old", "v1", ReplicaState.STARTING)
    assert scene.traffic.choose_revision(request("r")) == chosen


def test_a_share_of_requests_is_mirrored_in_shadow_alone() -> None:
    for stage, expected in ((Stage.SHADOW, 100), (Stage.CANARY, 0), (Stage.WARMING, 0)):
        scene = Scene(stage)
        for number in range(200):
            scene.traffic.arrived(request(f"r{number}"), 7)
            for mirror in scene.fleet.added:  # answered at once, so that there is room for more
                scene.traffic.ended(attempt(mirror, "v2", finish_reason=FinishReason.ABORT))
        assert len(scene.fleet.added) == pytest.approx(expected, abs=25)
        assert scene.traffic.take_report("echo", 0, 0).arrived_tokens == 1400


def test_a_mirrored_request_goes_to_the_candidate_and_is_not_mirrored_again() -> None:
    scene = Scene(Stage.SHADOW)
    scene.mirrored()
    (mirror,) = scene.fleet.added
    assert scene.traffic.choose_revision(mirror) == "v2"
    scene.traffic.arrived(mirror, 2)
    assert len(scene.fleet.added) == 1


@pytest.mark.parametrize(("tokens", "diverged"), [((5, 6), 0), ((5, 7), 1)])
def test_answers_are_compared(tokens: tuple[int, ...], diverged: int) -> None:
    scene = Scene(Stage.SHADOW)
    original = scene.mirrored()
    (mirror,) = scene.fleet.added
    scene.traffic.ended(attempt(mirror, "v2", tokens))
    scene.traffic.ended(attempt(original, "v1", (5, 6)))
    report = scene.traffic.take_report("echo", 3, 9)
    assert (report.stage_number, report.num_compared, report.num_diverged) == (1, 1, diverged)
    assert (report.held_requests, report.held_tokens) == (3, 9)
    assert scene.traffic.take_report("echo", 0, 0).num_compared == 0


def test_only_the_beginning_of_answers_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "COMPARED_TOKENS", 2)
    scene = Scene(Stage.SHADOW)
    original = scene.mirrored()
    scene.traffic.ended(attempt(original, "v1", (5, 6, 7)))
    scene.traffic.ended(attempt(scene.fleet.added[0], "v2", (5, 6, 8)))
    assert scene.traffic.take_report("echo", 0, 0).num_diverged == 0


def test_answers_that_differ_by_chance_are_not_compared() -> None:
    scene = Scene(Stage.SHADOW)
    original = scene.mirrored()
    mirror = replace(scene.fleet.added[0], sampling=SamplingParams(max_tokens=4, temperature=1.0))
    scene.traffic.ended(attempt(original, "v1", (5, 6)))
    scene.traffic.ended(attempt(mirror, "v2", (8, 9)))
    assert scene.traffic.take_report("echo", 0, 0).num_compared == 0


def test_when_the_client_leaves_so_does_the_mirror_image() -> None:
    scene = Scene(Stage.SHADOW)
    original = scene.mirrored()
    scene.traffic.ended(attempt(original, "v1", finish_reason=FinishReason.ABORT))
    assert scene.fleet.aborted == [scene.fleet.added[0].id]
    assert scene.traffic.take_samples() == ()


def test_mirrored_requests_are_bounded_and_lost_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(Stage.SHADOW)
    for number in range(1000):
        scene.traffic.arrived(request(f"r{number}"), 1)
    assert len(scene.fleet.added) == MAX_MIRRORED
    monkeypatch.setattr(traffic, "MIRROR_TIMEOUT_S", 0.0)
    for number in range(1000, 1100):
        scene.traffic.arrived(request(f"r{number}"), 1)
    assert len(scene.fleet.added) > MAX_MIRRORED


def test_a_mirror_image_that_finds_no_replica_is_forgotten() -> None:
    scene = Scene(Stage.SHADOW)
    scene.fleet.failure = EngineUnavailable("Nobody is there.")
    for number in range(1000):
        scene.traffic.arrived(request(f"r{number}"), 1)
    assert len(scene.fleet.added) > MAX_MIRRORED


def test_samples_tell_the_stage_that_a_request_began_in() -> None:
    scene = Scene(Stage.CANARY)
    names = ("early", "late", "failed", "refused", "bound")
    early, late, failed, refused, bound = (request(name) for name in names)
    scene.traffic.choose_revision(early)
    scene.enter(Stage.CANARY, 2)
    for begun in (late, failed, refused, bound):
        scene.traffic.choose_revision(begun)
    scene.traffic.ended(attempt(early, "v1"))
    scene.traffic.ended(attempt(late, "v2"))
    gone = EngineUnavailable("It is gone.")
    scene.traffic.ended(attempt(failed, "v2", ttft_s=None, itl_s=None, finish_reason=None, error=gone))
    wrong = InvalidRequest("It is wrong.")  # whichever revision is asked
    scene.traffic.ended(attempt(refused, "v2", ttft_s=None, itl_s=None, finish_reason=None, error=wrong))
    scene.traffic.ended(attempt(bound, "v2", finish_reason=FinishReason.INVALID))  # by its own grammar
    samples = scene.traffic.take_samples()
    assert [(sample.stage_number, sample.has_failed) for sample in samples] == [
        (None, False),
        (2, False),
        (2, True),
    ]


def test_what_the_caller_caused_is_not_a_dropped_request() -> None:
    asked = request("r")
    assert is_dropped(attempt(asked, "v1")) is False
    assert is_dropped(attempt(asked, "v1", finish_reason=FinishReason.ERROR)) is True
    assert is_dropped(attempt(asked, "v1", finish_reason=FinishReason.INVALID)) is None
    assert is_dropped(attempt(asked, "v1", finish_reason=FinishReason.ABORT)) is None
    assert is_dropped(attempt(asked, "v1", finish_reason=None, error=InvalidRequest("wrong"))) is None
