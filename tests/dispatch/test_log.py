"""A dispatch log replays action for action: of a live fleet with engine processes that are killed, and of a
simulation of faults."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest

from penstock.cluster.fleet import Fleet
from penstock.cluster.local import LocalLauncher
from penstock.cluster.supervisor import Supervisor
from penstock.core.errors import UsageError
from penstock.core.objective import RoutingWeights
from penstock.dispatch import DispatchConfig
from penstock.dispatch.log import LogHeader, RecordingDispatcher, read_dispatch_log
from penstock.router import ReplicaState
from penstock.simulator.driver import Driver
from penstock.simulator.fleet import SimulatedFleet
from penstock.simulator.replay import replay_dispatch
from penstock.simulator.simulation import ReplicaConfig
from penstock.simulator.workload import Fixed, Uniform, Workload, generate
from tests.cluster.engines import ENDLESS, check_beginning, echo_spec, make_request, send, until


async def test_a_live_fleet_under_a_fault_replays_action_for_action(tmp_path: Path) -> None:
    path = tmp_path / "dispatch.jsonl"
    supervisor = Supervisor({"local": LocalLauncher()}, heartbeat_timeout_s=60.0)
    fleet = Fleet(record_to=path)
    fleet.choose_revisions(lambda request: "")  # asked for every attempt, and part of the log
    fleet.route_by({"": RoutingWeights(policy="round-robin")})
    supervisor.on_change.append(fleet.update)
    try:
        await asyncio.gather(*(supervisor.launch(echo_spec()) for _ in range(2)))
        await until(lambda: sum(each.state is ReplicaState.READY for each in fleet.replicas.values()) == 2)
        inboxes = [
            send(fleet, make_request(f"r{number}", bytes([65 + number]) * 40, max_tokens=ENDLESS), 600.0)
            for number in range(8)
        ]
        for inbox in inboxes:
            await inbox.until(lambda inbox: len(inbox.tokens) > 5)
        victim = max(fleet.replicas.values(), key=lambda replica: replica.num_sent).id
        pid = supervisor.pid(victim)
        assert pid is not None
        fleet.abort("r7")
        os.kill(pid, signal.SIGKILL)
        for number, inbox in enumerate(inboxes[:-1]):
            await check_beginning(inbox, bytes([65 + number]), len(inbox.tokens) + 500)
            fleet.abort(f"r{number}")
        await until(lambda: sum(each.state is ReplicaState.READY for each in fleet.replicas.values()) == 2)
        assert fleet.verdicts["continue"] > 0
    finally:
        await supervisor.close()
        fleet.close()
    with path.open("rb") as log:
        replay = replay_dispatch(log)
    assert replay.mismatch is None
    assert replay.num_calls > 100
    kinds = actions_in(path)
    assert {"send", "deliver", "cancel", "attempt_ended", "first_token", "arrived"} <= kinds.keys()
    assert replay.num_actions == sum(kinds.values())
    assert kinds["send"] > 8, "some requests were sent twice"


def actions_in(path: Path) -> Counter[str]:
    with path.open("rb") as log:
        _, records = read_dispatch_log(log)
        return Counter(
            action["action"] for record in records for action in msgspec.json.decode(record.actions)
        )


def simulated_log(num_requests: int = 120) -> list[bytes]:
    """Requests for a replica that is not ready at first, fills up, and dies."""
    lines: list[bytes] = []
    config = DispatchConfig(routing_policy="power-of-two")
    dispatcher = RecordingDispatcher(config, 5, Random(5), 0.0, lines.append)
    fleet = SimulatedFleet(ReplicaConfig(num_blocks=64).build, block_size=16, max_step_tokens=2048)
    members = [
        fleet.start(state) for state in (ReplicaState.READY, ReplicaState.READY, ReplicaState.STARTING)
    ]
    driver = Driver(fleet, [dispatcher], lambda outcome, now: None)

    def strike(now: float) -> None:
        members[0].is_alive = False
        del fleet.members[members[0].id]
        members[2].state = ReplicaState.READY
        driver.update(now)

    driver.events.at(0.5, 1, strike)  # type: ignore[arg-type]
    workload = Workload(
        num_requests=num_requests,
        requests_per_s=100.0,
        prompt_tokens=Uniform(10, 60),
        output_tokens=Fixed(20),
        mean_patience_s=2.0,
        timeout_s=3.0,
    )
    driver.run(generate(workload, Random(1)))
    return lines


def test_a_simulated_fleet_replays_action_for_action() -> None:
    replay = replay_dispatch(simulated_log())
    assert replay.mismatch is None
    assert replay.num_actions > 120 * 4


def test_another_seed_gives_other_actions_and_the_replay_says_where() -> None:
    header, *records = simulated_log()
    other = msgspec.structs.replace(msgspec.json.decode(header, type=LogHeader), seed=6)
    replay = replay_dispatch([msgspec.json.encode(other), *records])
    assert replay.mismatch is not None
    assert replay.mismatch.replayed != bytes(replay.mismatch.record.actions)


def test_a_log_that_was_cut_off_says_which_line() -> None:
    lines = simulated_log(5)
    with pytest.raises(UsageError, match=f"Line {len(lines)} "):
        replay_dispatch([*lines[:-1], lines[-1][:20]])


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "dispatch.md"
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), {})
    assert "Send(replica_id='a'" in capsys.readouterr().out
