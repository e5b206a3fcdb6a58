"""What faults cost prefill and decode pools: `python -m bench.disaggregation_faults [--requests 30] [--decode 1 2]`.

One prefill engine and some decode engines of a small random model, which is slow to prefill. Clients ask for answers
to long prompts, one after the other, while one engine is killed or frozen (SIGSTOP, until its supervisor replaces
it). Every answer is compared with that of an undisturbed run (greedy). Prints a table in Markdown; exits with 1 if a
request was lost or an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.replica_rig import Answer, RememberingLauncher, Rig
from penstock.cluster.fleet import Fleet
from penstock.cluster.replica import ReplicaSpec, Role
from penstock.cluster.supervisor import Supervisor
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.request import Request, SamplingParams
from tests.engine.tiny import write_tiny_model

MODEL = "tiny"
PROMPT_TOKENS = 1200
MAX_TOKENS = 40
CLIENTS = 8
FAULTS: dict[str, tuple[Role, signal.Signals]] = {
    "prefill engine killed": ("prefill", signal.SIGKILL),
    "prefill engine frozen": ("prefill", signal.SIGSTOP),
    "decode engine killed": ("decode", signal.SIGKILL),
    "decode engine frozen": ("decode", signal.SIGSTOP),
}
HEADS = (
    "fault",
    "decode engines",
    "answered",
    "lost",
    "differ",
    "retried",
    "longest to first token before",
    "with the fault",
    "longest pause",
)


@dataclass(frozen=True, slots=True)
class Row:
    fault: str
    num_decode: int
    undisturbed: list[Answer]
    answers: list[Answer]
    num_differing: int
    num_retried: int

    @property
    def num_lost(self) -> int:
        return sum(answer.error is not None for answer in self.answers)

    def cells(self) -> list[str]:
        answered = [answer for answer in self.answers if answer.error is None]
        first_s = max(answer.ttft_s or 0.0 for answer in answered)
        pause_s = max(answer.longest_gap_s for answer in answered)
        counts = (self.num_decode, len(answered), self.num_lost, self.num_differing, self.num_retried)
        before_s = max(answer.ttft_s or 0.0 for answer in self.undisturbed)
        return [self.fault, *map(str, counts), f"{before_s:.1f} s", f"{first_s:.1f} s", f"{pause_s:.1f} s"]


def make_requests(count: int, name: str) -> Iterator[Request]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(count):
        prompt = tuple(3 + ((number + 10) * n * n + n) % 290 for n in range(PROMPT_TOKENS))
        # Tenants share no cache, so that every run computes its prompts.
        yield Request(
            id=f"{name} {number}", prompt_token_ids=prompt, sampling=sampling, model=MODEL, tenant=name
        )


def spec_of(model: Path, role: Role) -> ReplicaSpec:
    steps = SchedulerConfig(
        itl_target_ms=None, max_num_batched_tokens=32 if role == "prefill" else 512, max_num_seqs=16
    )
    engine = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=2048),
        scheduler=steps,
        num_threads=1,
        kv_transfer=True,
    )
    return ReplicaSpec(model=MODEL, engine=engine, model_path=str(model), revision="a", role=role)


async def ask_all(rig: Rig, count: int, name: str) -> list[Answer]:
    requests = make_requests(count, name)
    answers: dict[str, Answer] = {}

    async def ask_next() -> None:
        for request in requests:
            answers[request.id] = await rig.ask(request)

    await asyncio.gather(*(ask_next() for _ in range(CLIENTS)))
    return [answers[f"{name} {number}"] for number in range(count)]


async def strike(fault: str, num_decode: int, count: int, model: Path) -> Row:
    role, number = FAULTS[fault]
    supervisor, fleet = Supervisor({"local": RememberingLauncher()}), Fleet()
    supervisor.on_change.append(fleet.update)
    rig = Rig(supervisor, fleet)
    try:
        specs = [spec_of(model, "prefill"), *[spec_of(model, "decode")] * num_decode]
        await asyncio.gather(*map(supervisor.launch, specs))
        await rig.until_ready(len(specs))
        undisturbed = await ask_all(rig, count, "undisturbed")
        asking = asyncio.create_task(ask_all(rig, count, "disturbed"))
        while len(rig.answers) < count + CLIENTS + 2:
            await asyncio.sleep(0.01)
        struck = next(each for each in supervisor.members() if each.spec.role == role)
        rig.signal(struck.id, number)
        began_s = time.perf_counter()
        answers = await asking
        print(f"{fault}: the others took {time.perf_counter() - began_s:.1f} s", file=sys.stderr)
        for answer in answers:
            if answer.error is not None:
                print(f"lost after {len(answer.tokens)} tokens: {answer.error.message}", file=sys.stderr)
        retried = sum(fleet.verdicts[name] for name in ("restart", "continue"))
    finally:
        await supervisor.close()
        fleet.close()
    differing = sum(
        a.tokens != b.tokens for a, b in zip(answers, undisturbed, strict=True) if a.error is None
    )
    return Row(fault, num_decode, undisturbed, answers, differing, retried)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 2], help="numbers of decode engines")
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    options = parser.parse_args()
    print("| " + " | ".join(HEADS) + " |")
    print("|---" * len(HEADS) + "|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        config = json.loads((model / "config.json").read_text())
        longer = {"max_position_embeddings": 4096, "num_hidden_layers": 6}
        (model / "config.json").write_text(json.dumps(config | longer))
        for num_decode in options.decode:
            for fault in options.only:
                row = uvloop.run(strike(fault, num_decode, options.requests, model))
                print("| " + " | ".join(row.cells()) + " |", flush=True)
                rows.append(row)
    sys.exit(0 if all(row.num_lost == row.num_differing == 0 for row in rows) else 1)


if __name__ == "__main__":
    main()
