"""Makes the requests of a trace, one at a time: the prompts of 100,000 requests would take gigabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.request import Request, SamplingParams
from penstock.planner.capacity import BLOCK_TOKENS
from penstock.planner.traffic import TraceLine
from penstock.simulator import Tenant, Workload
from penstock.simulator.workload import Arrival

_MOST_TOKEN_ID = (1 << 31) - (1 << 23)  # a prompt and its answer still fit behind it


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """The requests of a trace. Times count from the first request. Prompts with equal block ids begin alike; all
    others have nothing in common."""

    lines: Sequence[TraceLine]

    @property
    def duration_s(self) -> float:
        return self.lines[-1].time_s - self.lines[0].time_s

    def described_by(self, workload: Workload) -> Workload:
        """Return a workload with the number, the mean rate and the tenants of these requests."""
        senders = dict.fromkeys((line.tenant, line.tier) for line in self.lines)
        return replace(
            workload,
            num_requests=len(self.lines),
            requests_per_s=len(self.lines) / max(1.0, self.duration_s),
            tenants=tuple(Tenant(name, tier=tier) for name, tier in senders),
        )

    def __iter__(self) -> Iterator[Arrival]:
        first_s, next_token = self.lines[0].time_s, 1
        known: dict[tuple[str, int], int] = {}  # tenants and blocks: where the tokens of a block begin
        for number, line in enumerate(self.lines):
            tokens: list[int] = []
            size = line.block_tokens
            for block in line.blocks[: line.prompt_tokens // size + 1]:
                begin = known.get((line.tenant, block))
                if begin is None:
                    begin = known[line.tenant, block] = next_token
                    next_token += size
                tokens += range(begin, begin + size)
            del tokens[line.prompt_tokens :]
            missing = line.prompt_tokens - len(tokens)
            tokens += range(next_token, next_token + missing)
            next_token += missing
            if next_token > _MOST_TOKEN_ID:
                next_token = 1  # prompts of so long ago are no longer cached anywhere
                known.clear()
            yield _arrival(f"r{number}", line, tuple(tokens), line.time_s - first_s)


def _arrival(request_id: str, line: TraceLine, tokens: tuple[int, ...], time_s: float) -> Arrival:
    return Arrival(
        time_s,
        Request(
            id=request_id,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=line.output_tokens),
            tenant=line.tenant,
            tier=line.tier,
        ),
        line.output_tokens,
        block_hashes=tuple(chain_hashes(root_hash(line.tenant), tokens[:-1], BLOCK_TOKENS)),
    )
