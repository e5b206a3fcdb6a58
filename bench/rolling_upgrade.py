"""A rolling upgrade of a shared fleet under load: `python -m bench.rolling_upgrade [--previous REF] [--streams 24]`.

Starts the fleet of `shared_faults` on loopback, with the version that git knows as REF. Then it replaces each host
of engines, each control process and each gateway by this version, one after the other: hosts and control processes
by a new one beside the old one, gateways at their own address. A load balancer checks `/ready` every 0.2 s and sends
clients to ready gateways. Every answer is compared and looked up in the ledger. Exits with 1 unless every request
was answered at once, rightly, and billed once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import httpx

from bench.shared_faults import MAX_TOKENS, SETTLE_S, Tally, billed, stream
from bench.shared_faults_rig import ROOT, Process, Rig, fleet
from penstock.core.tasks import end_task

CHECK_S = 0.2
LAME_DUCK_S = 3  # far longer than the load balancer takes to notice
LEAVE_LIMIT_S = 120.0


def files_of(ref: str, folder: Path) -> Path:
    """Extract the package of another version. Returns the folder for PYTHONPATH."""
    archive = subprocess.run(["git", "archive", ref, "penstock"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


async def balance(rig: Rig) -> None:
    """Check the gateways as a load balancer does."""
    while True:
        for number, url in enumerate(rig.urls):
            try:
                answer = await rig.http.get(f"{url}/ready", timeout=10.0)
                rig.is_ready[number] = answer.status_code == 200
            except httpx.HTTPError:
                rig.is_ready[number] = False
        await asyncio.sleep(CHECK_S)


def of_this_version(process: Process) -> Process:
    return replace(process, files=ROOT, log=process.log.with_suffix(".new.log"), running=None)


async def leave(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.running is not None
    async with asyncio.timeout(LEAVE_LIMIT_S):
        await asyncio.to_thread(process.running.wait)


async def upgrade(rig: Rig) -> None:
    for processes, marker in (
        (rig.engines, " to the gateways of the fleet."),
        (rig.controls, "ready to lead"),
    ):
        for number, old in enumerate(processes):
            new = of_this_version(old)
            new.start()
            rig.started.append(new)
            while marker not in new.log.read_text():
                await asyncio.sleep(0.1)
            await leave(old)
            processes[number] = new
            await rig.until_well()
    for number, old in enumerate(rig.gateways):
        await leave(old)
        new = of_this_version(old)
        new.start()
        rig.started.append(new)
        rig.gateways[number] = new
        await rig.until_well()
        while not rig.is_ready[number]:
            await asyncio.sleep(CHECK_S)


async def run(folder: Path, previous: Path, num_streams: int) -> bool:
    over, tally = asyncio.Event(), Tally()
    options = ("--lame-duck-s", str(LAME_DUCK_S))
    with fleet(folder, files=previous, gateway_options=options) as rig:
        await rig.until_well()
        balancing = asyncio.create_task(balance(rig))
        clients = [asyncio.create_task(stream(rig, 0, client, over, tally)) for client in range(num_streams)]
        await asyncio.sleep(SETTLE_S)
        began_s = time.monotonic()
        await upgrade(rig)
        took_s = time.monotonic() - began_s
        await asyncio.sleep(SETTLE_S)
        over.set()
        await asyncio.gather(*clients)
        await end_task(balancing)
        found = await billed(rig, tally.answered)
        await rig.http.aclose()
    num_unbilled = len(tally.answered) - len(found)
    num_wrongly = sum(tokens != MAX_TOKENS for tokens in found.values())
    print(f"upgraded two hosts, two control processes and two gateways in {took_s:.0f} s")
    print(f"  {len(tally.answered)} requests answered, {tally.wrong} of them wrongly")
    print(f"  {tally.refused} refused, {tally.reconnected} cut off")
    print(f"  {num_unbilled} billed never, {num_wrongly} billed wrongly")
    print(f"  longest pause of a stream {tally.longest_pause_s:.1f} s")
    return not (tally.wrong or tally.refused or tally.reconnected or num_unbilled or num_wrongly)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--previous", metavar="REF", help="the version to begin with; this one if not given")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--logs", type=Path, help="folder to keep the logs of all processes in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        previous = ROOT
        if options.previous is not None:
            previous = files_of(options.previous, Path(temporary) / "previous")
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        is_good = asyncio.run(run(folder, previous, options.streams))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
