"""What faults cost real replicas: `python -m bench.faults [MODEL] [--replicas 3] [--streams 12] [--json FILE]`.

One line per fault. Every fault meets the same streams in mid-answer, on fresh engine processes: how many requests
were sent and answered, how many attempts were lost and made again, how many answers differ from those of an
undisturbed run (greedy, so none may), the longest pause that a reader saw, and how long it took until all replicas
served again. At the end every engine that lives must say that it has lost track of no KV block, or the run fails. The
simulator's table, for fleets of any size and in virtual time, is `bench/fleet_faults.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.replica_rig import Answer, Rig, running, spec_for
from penstock.cluster.fleet import Fleet
from penstock.core.request import Request, SamplingParams
from penstock.dispatch import DispatchConfig
from penstock.router import ReplicaState

PROMPT_TOKENS = 120
STRUCK_AT = 0.1  # of the answers, that all of them have
OTHERS_RUN_S = 0.5
RECOVERY_LIMIT_S = 120.0
FIRST_TOKEN_ID = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: str
    sent: int
    answered: int
    retried: int  # attempts that were lost and made again
    differing: int  # answers that are not those of an undisturbed run
    longest_pause_s: float
    recovery_s: float | None  # None: nothing had to recover
    note: str = ""


# Strikes once the streams run. Returns when everything serves again, with something to say about it.
Fault = Callable[[Rig], Awaitable[str]]


def busiest(rig: Rig) -> str:
    loads = {replica_id: rig.fleet.router.load(replica_id) for replica_id in rig.fleet.replicas}
    return max(loads, key=lambda name: load.own_requests if (load := loads[name]) else 0)


async def restarted(rig: Rig, count: int) -> None:
    while rig.num_ready() == count:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(rig.until_ready(count), RECOVERY_LIMIT_S)


async def kill(rig: Rig) -> str:
    count = rig.num_ready()
    rig.signal(busiest(rig), signal.SIGKILL)
    await restarted(rig, count)
    return ""


async def freeze(rig: Rig) -> str:
    count = rig.num_ready()
    rig.signal(busiest(rig), signal.SIGSTOP)
    await restarted(rig, count)
    return ""


async def kill_all(rig: Rig) -> str:
    count = rig.num_ready()
    for link in tuple(rig.fleet.replicas.values()):
        rig.signal(link.id, signal.SIGKILL)
    await restarted(rig, count)
    return ""


async def restart_gateway(rig: Rig) -> str:
    """Another gateway, with streams of its own, dies: the engines must forget those, and nothing else."""
    other = Fleet()
    other.update(rig.supervisor.members())
    await other.wait_ready()
    theirs = [
        asyncio.create_task(rig.ask(request, other))
        for request in make_requests(6, 10_000, "another gateway's")
    ]
    await asyncio.sleep(OTHERS_RUN_S)
    ours = rig.fleet.stats.num_running + rig.fleet.stats.num_waiting - len(theirs)
    other.close()
    for task in theirs:
        task.cancel()
    while rig.fleet.stats.num_running + rig.fleet.stats.num_waiting > ours:
        await asyncio.sleep(0.01)
    successor = Fleet()
    successor.update(rig.supervisor.members())
    await successor.wait_ready()
    successor.close()
    return f"{len(theirs)} streams of the gateway that died were freed"


async def lose_kv_events(rig: Rig) -> str:
    links = tuple(rig.fleet.replicas.values())
    for link in links:
        client = rig.fleet.connections.by_id[link.id].client
        hear = client._on_kv_events  # type: ignore[attr-defined]
        client._on_kv_events = lambda events: None  # type: ignore[attr-defined]
        asyncio.get_running_loop().call_later(0.5, setattr, client, "_on_kv_events", hear)
    await asyncio.sleep(0.6)
    for number in range(4 * len(links)):  # news that shows the gap
        (request,) = make_requests(1, 2, f"after the loss, {number}")
        await rig.ask(request)
    while rig.fleet.router.resyncs_needed():
        await asyncio.sleep(0.01)
    return f"{sum(link.num_resyncs for link in links)} replicas told everything again"


async def slow_down(rig: Rig) -> str:
    """While others send requests too: a replica without work is not slow."""
    slow = rig.fleet.replicas[busiest(rig)]
    others = [asyncio.create_task(keep_asking(rig, number)) for number in range(3 * rig.num_ready())]
    began_s = time.perf_counter()
    while slow.state is ReplicaState.READY and time.perf_counter() < began_s + RECOVERY_LIMIT_S:
        rig.signal(slow.id, signal.SIGSTOP)
        await asyncio.sleep(0.2)
        rig.signal(slow.id, signal.SIGCONT)
        await asyncio.sleep(0.02)
    for task in others:
        task.cancel()
    if slow.state is ReplicaState.READY:
        return "it was not noticed"
    return "left out; keeps what it has"


async def keep_asking(rig: Rig, number: int) -> None:
    for turn in itertools.count():
        (request,) = make_requests(1, 50, f"others-{number}-{turn}")
        await rig.ask(request)


FAULTS: dict[str, Fault | None] = {
    "nothing": None,
    "an engine is killed (kill -9)": kill,
    "an engine freezes (SIGSTOP)": freeze,
    "all engines are killed at once": kill_all,
    "another gateway dies and comes back": restart_gateway,
    "KV events are lost for half a second": lose_kv_events,
    "an engine is ten times slower": slow_down,
}


def make_requests(count: int, max_tokens: int, name: str) -> list[Request]:
    return [
        Request(
            id=f"{name}-{number}",
            prompt_token_ids=tuple(
                FIRST_TOKEN_ID + (number * 31 + position * 7) % 89 for position in range(PROMPT_TOKENS)
            ),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            tenant=name,
        )
        for number in range(count)
    ]


async def strike(name: str, fault: Fault | None, options: argparse.Namespace) -> Outcome:
    spec = spec_for(options.model, options.replicas)
    async with running(spec, options.replicas, DispatchConfig()) as rig:
        undisturbed = await ask_all(rig, make_requests(options.streams, options.tokens, "undisturbed"))
        tasks = [
            asyncio.create_task(rig.ask(request))
            for request in make_requests(options.streams, options.tokens, "disturbed")
        ]
        await asyncio.sleep(0)  # the tasks begin
        streams = rig.answers[-options.streams :]
        while any(len(stream.tokens) < STRUCK_AT * options.tokens for stream in streams):
            await asyncio.sleep(0.001)
        struck_s = time.perf_counter()
        note = "" if fault is None else await fault(rig)
        recovery_s = None if fault is None else time.perf_counter() - struck_s
        answers = await asyncio.gather(*tasks)
        verdicts = Counter(rig.fleet.verdicts)  # the end of the rig is none of it
    return Outcome(
        name,
        sent=len(answers),
        answered=sum(answer.error is None for answer in answers),
        retried=verdicts["restart"] + verdicts["continue"],
        differing=sum(a.tokens != b.tokens for a, b in zip(answers, undisturbed, strict=True)),
        longest_pause_s=max(answer.longest_gap_s for answer in answers),
        recovery_s=recovery_s,
        note=note,
    )


async def ask_all(rig: Rig, requests: Sequence[Request]) -> list[Answer]:
    return list(await asyncio.gather(*map(rig.ask, requests)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads = ("sent", "answered", "retried", "differ", "pause s", "again s")
    print(f"{'':<40}" + "".join(f"{head:>9}" for head in heads), flush=True)
    outcomes = []
    for name, fault in FAULTS.items():
        if options.only not in name:
            continue
        outcome = uvloop.run(strike(name, fault, options))
        outcomes.append(outcome)
        recovery = "" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f}"
        counts = (outcome.sent, outcome.answered, outcome.retried, outcome.differing)
        cells = (*counts, f"{outcome.longest_pause_s:.1f}", recovery)
        print(f"{name:<40}" + "".join(f"{cell:>9}" for cell in cells) + f"  {outcome.note}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
