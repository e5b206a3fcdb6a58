"""What faults cost a shared fleet of real processes: `python -m bench.shared_faults [--streams 24]`.

Starts Redis, PostgreSQL, an object store, two hosts of engines, two gateways and two control processes. Clients
stream answers, one after the other, while one part is killed, frozen for 20 s, takes no writes for 20 s, or is cut
off from the others for 20 s: in both directions, or in one. Every answer is compared with the one that is right (the
model echoes its prompt), and every answered request is looked up in the ledger. Prints a table in Markdown; exits
with 1 if a token was lost or repeated, an answer was billed twice or never, or two leaders acted. Faults of the
network need root, `ip`, `nft` and `nsenter` (`network_namespaces`); without them, all parts are on loopback, and no
part is cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import select

from bench.network_namespaces import Network, network, why_not
from bench.shared_fault_kinds import FAULTS, NETWORK_FAULTS, STORE
from bench.shared_faults_rig import EpochWatch, Rig, fleet
from penstock.core.tasks import end_task
from penstock.gateway.store.tables import usage

FAULT_S = 20.0  # of a freeze or a cut
SETTLE_S = 4.0  # of undisturbed streams before the fault, and after it
MAX_TOKENS = 400
HEADS = (
    "fault",
    "answered",
    "asked again",
    "refused",
    "wrong answers",
    "billed never, wrongly",
    "late orders",
    "longest pause",
    "all well",
)


@dataclass(slots=True)
class Tally:
    answered: list[str] = field(default_factory=list)  # request ids
    wrong: int = 0
    reconnected: int = 0
    refused: int = 0  # answered with an error, then asked again
    longest_pause_s: float = 0.0
    num_files: int = 0  # sent and read back


async def stream(rig: Rig, number: int, client: int, over: asyncio.Event, tally: Tally) -> None:
    """One client: asks again when it is answered, and asks the other gateway when its own is gone."""
    gateway, asked = client % 2, 0
    while not over.is_set():
        prompt = f"client {client} of fault {number} asks {asked}: "
        right = (prompt * (MAX_TOKENS // len(prompt) + 1))[:MAX_TOKENS]
        body = {"model": "echo", "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True}
        if not rig.is_ready[gateway] and any(rig.is_ready):
            gateway = rig.is_ready.index(True)
        text, last_s = "", time.monotonic()
        try:
            async with rig.http.stream("POST", f"{rig.urls[gateway]}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    tally.refused += 1
                    said = (await answer.aread()).decode(errors="replace")
                    print(f"{rig.urls[gateway]}: {answer.status_code} {said}", file=sys.stderr)
                    await asyncio.sleep(0.5)
                    continue
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        text += "".join(choice["text"] for choice in event.get("choices", ()))
                    tally.longest_pause_s = max(tally.longest_pause_s, time.monotonic() - last_s)
                    last_s = time.monotonic()
                tally.answered.append(answer.headers["x-request-id"])
                tally.wrong += text != right
                asked += 1
            await asyncio.sleep(rig.pause_s)
        except httpx.HTTPError as error:
            tally.reconnected += 1
            print(f"{rig.urls[gateway]}: {error!r} after {len(text)} characters", file=sys.stderr)
            gateway = 1 - gateway
            await asyncio.sleep(0.1)


async def keep_files(rig: Rig, over: asyncio.Event, tally: Tally) -> None:
    """One client: sends a file to one gateway, reads it from the other, and removes it."""
    asked = 0
    while not over.is_set():
        content = f"the content of file {asked} ".encode() * 100
        first, second = (f"{rig.urls[(asked + place) % 2]}/v1/files" for place in range(2))
        asked += 1
        try:
            sent = await rig.http.post(
                first, data={"purpose": "user_data"}, files={"file": ("notes.txt", content)}
            )
            sent.raise_for_status()
            name = sent.json()["id"]
            read = await rig.http.get(f"{second}/{name}/content")
            read.raise_for_status()
            tally.wrong += read.content != content
            tally.num_files += 1
            (await rig.http.delete(f"{first}/{name}")).raise_for_status()
        except httpx.HTTPStatusError:
            tally.refused += 1
            await asyncio.sleep(0.5)
        except httpx.HTTPError as error:
            tally.reconnected += 1
            print(f"{first}: {error!r} for a file", file=sys.stderr)
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    tally: Tally
    well_after_s: float
    unbilled: int
    wrongly_billed: int
    num_late_orders: int  # of leaders whose time was over

    @property
    def is_good(self) -> bool:
        return not (self.tally.wrong or self.unbilled or self.wrongly_billed or self.num_late_orders)


async def measure(rig: Rig, number: int, name: str, num_streams: int) -> Row:
    over, tally, epochs = asyncio.Event(), Tally(), EpochWatch(rig)
    watching = asyncio.create_task(epochs.keep_looking())
    clients = [asyncio.create_task(stream(rig, number, client, over, tally)) for client in range(num_streams)]
    if name.startswith(STORE):
        clients.append(asyncio.create_task(keep_files(rig, over, tally)))
    await asyncio.sleep(SETTLE_S)
    struck_s = time.monotonic()
    await {**FAULTS, **NETWORK_FAULTS}[name](rig)
    await rig.until_well()
    well_after_s = time.monotonic() - struck_s
    await asyncio.sleep(SETTLE_S)
    over.set()
    await asyncio.gather(*clients)
    await end_task(watching)
    found = await billed(rig, tally.answered)
    wrongly = sum(tokens != MAX_TOKENS for tokens in found.values())
    return Row(name, tally, well_after_s, len(tally.answered) - len(found), wrongly, epochs.num_late)


async def billed(rig: Rig, request_ids: list[str]) -> Counter[str]:
    """Return the sum of the tokens billed by request id. The ledger writes a moment after the answer."""
    wanted = set(request_ids)
    deadline_s = time.monotonic() + 15.0
    while True:
        rows = await rig.database.run(
            lambda connection: list(
                connection.execute(select(usage.c.request_id, usage.c.completion_tokens))
            ),
            reads_only=True,
        )
        found: Counter[str] = Counter()
        for request_id, tokens in rows:
            if request_id in wanted:
                found[request_id] += tokens
        if len(found) == len(wanted) or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.5)


async def run(folder: Path, options: argparse.Namespace, made: Network | None) -> list[Row]:
    rows = []
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    has_store = any(name.startswith(STORE) for name in options.only)
    with fleet(folder, made, has_store=has_store, clock_library=options.clocks_apart) as rig:
        await rig.until_well()
        rig.fault_s, rig.pause_s = options.fault_s, options.pause_s
        for number, name in enumerate(options.only):
            row = await measure(rig, number, name, options.streams)
            tally = row.tally
            files = f" and {tally.num_files} files" if tally.num_files else ""
            cells = (
                name,
                f"{len(tally.answered)}{files}",
                tally.reconnected,
                tally.refused,
                tally.wrong,
                f"{row.unbilled}, {row.wrongly_billed}",
                row.num_late_orders,
                f"{tally.longest_pause_s:.1f} s",
                f"after {row.well_after_s:.1f} s",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            rows.append(row)
        await rig.http.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=24)
    names = [*FAULTS, *NETWORK_FAULTS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="FAULT")
    parser.add_argument("--fault-s", type=float, default=FAULT_S, help="of a freeze or a cut")
    parser.add_argument("--pause-s", type=float, default=0.0, help="of a client between two answers")
    parser.add_argument(
        "--clocks-apart",
        type=Path,
        metavar="LIBRARY",
        help="libfaketime's, which sets the clocks minutes apart",
    )
    parser.add_argument("--logs", type=Path, help="folder to keep the logs of all processes in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        reason = why_not()
        if reason is not None:
            print(f"The network stays whole: {reason}.", file=sys.stderr)
            options.only = [name for name in options.only if name not in NETWORK_FAULTS]
        with contextlib.nullcontext() if reason is not None else network() as made:
            rows = asyncio.run(run(folder, options, made))
    sys.exit(0 if all(row.is_good for row in rows) else 1)


if __name__ == "__main__":
    main()
