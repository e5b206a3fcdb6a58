"""Reads the traffic to plan for: lengths as text, or a trace of requests in a published format; and makes the
requests of a trace, one at a time, because the prompts of 100,000 requests would take gigabytes.

Known traces: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure's LLM traces), and JSON lines
with `timestamp` in milliseconds, `input_length`, `output_length` and, if known, `hash_ids` of prefix blocks
(Mooncake's); both also packed by gzip. `penstock serve --record-requests` writes the latter, and adds `block_tokens`,
`tenant` and `tier`.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from pathlib import Path
from random import Random
from typing import TextIO

from penstock.core.errors import UsageError
from penstock.core.hashing import chain_hashes, root_hash
from penstock.core.request import Request, SamplingParams, Tier
from penstock.planner.capacity import BLOCK_TOKENS, Traffic
from penstock.simulator import Fixed, Tenant, Uniform, Workload
from penstock.simulator.workload import Arrival, Lengths

MOST_TOKENS = 1 << 22
_MOST_REQUESTS = 5_000_000
_MOST_SHOWN = 10  # numbers of damaged lines
MOONCAKE_BLOCK_TOKENS = 512
_GZIP = b"\x1f\x8b"
_DAMAGED_SHARE = 0.05  # of a trace's lines that may be left out


@dataclass(frozen=True, slots=True)
class EmpiricalLengths:
    """Draws a length from recorded lengths, all with the same probability."""

    tokens: tuple[int, ...]

    def draw(self, rng: Random) -> int:
        return rng.choice(self.tokens)


def parse_lengths(text: str, option: str) -> tuple[Lengths, float]:
    """Read `512` or `100:1024`; return the lengths and their mean."""
    low, _, high = text.partition(":")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        first = last = 0
    if not 1 <= first <= last <= MOST_TOKENS:
        raise UsageError(
            f"{option} {text} is neither a number of tokens nor a range.", hint="Write 512 or 100:1024."
        )
    return (Fixed(first) if first == last else Uniform(first, last)), (first + last) / 2


@dataclass(frozen=True, slots=True)
class TraceLine:
    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    tenant: str = "trace"
    tier: Tier = Tier.DEFAULT


@dataclass(frozen=True, slots=True)
class Trace:
    lines: Sequence[TraceLine]
    damaged: tuple[int, ...]  # numbers of lines that are no requests, the first line being 1

    def warning(self, path: Path) -> str | None:
        """Return a sentence about damaged lines, if there are any."""
        if not self.damaged:
            return None
        verb = "is no request and was" if len(self.damaged) == 1 else "are no requests and were"
        return f"{_listed(self.damaged)} of {path} {verb} left out."

    def traffic(self, requests_per_s: float | None = None) -> Traffic:
        """Return traffic with the trace's lengths, and with its mean rate unless another is given."""
        prompts = tuple(line.prompt_tokens for line in self.lines)
        outputs = tuple(line.output_tokens for line in self.lines)
        duration_s = self.lines[-1].time_s - self.lines[0].time_s
        return Traffic(
            requests_per_s=requests_per_s or max(1, len(self.lines) - 1) / max(1.0, duration_s),
            prompt_tokens=EmpiricalLengths(prompts),
            output_tokens=EmpiricalLengths(outputs),
            mean_prompt=sum(prompts) / len(prompts),
            mean_output=sum(outputs) / len(outputs),
            prefix_share=self._prefix_share(),
        )

    def _prefix_share(self) -> float:
        """Return the share of prefix blocks that an earlier request had, with a cache that forgets nothing."""
        seen: set[int] = set()
        known = total = 0
        for line in self.lines:
            total += len(line.blocks)
            known += sum(block in seen for block in line.blocks)
            seen.update(line.blocks)
        return min(0.95, known / total) if total else 0.0


def read_trace(path: Path) -> Trace:
    """Read a trace, in the order of time. A few damaged lines are left out and counted; more are an error."""
    try:
        with _open_text(path) as file:
            first = next((text for text in file if text.strip()), "")
            file.seek(0)
            is_json = first.lstrip().startswith("{")
            requests = _json_lines(file) if is_json else _csv_lines(file, path)
            parsed = list(islice(requests, _MOST_REQUESTS + 1)) if first else []
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file in UTF-8.") from error
    except (OSError, ValueError, EOFError, zlib.error, csv.Error) as error:  # ValueError: a NUL in the path
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if len(parsed) > _MOST_REQUESTS:
        raise UsageError(
            f"{path} has more than {_MOST_REQUESTS:,} requests, which memory may not hold.",
            hint="Give a part of it.",
        )
    lines = sorted((line for _, line in parsed if line is not None), key=lambda line: line.time_s)
    damaged = tuple(number for number, line in parsed if line is None)
    if not lines or len(damaged) > _DAMAGED_SHARE * len(parsed):
        raise UsageError(
            f"{len(damaged)} of the {len(parsed)} requests of {path} cannot be read: {_listed(damaged)}."
            if parsed
            else f"{path} holds no requests.",
            hint="Give a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, or JSON lines with timestamp, "
            "input_length and output_length.",
        )
    return Trace(lines, damaged)


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
    if is_packed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
    more = f" and {len(numbers) - _MOST_SHOWN} more" if len(numbers) > _MOST_SHOWN else ""
    return f"{'lines' if len(numbers) > 1 else 'line'} {shown}{more}"


def _json_lines(file: Iterator[str]) -> Iterator[tuple[int, TraceLine | None]]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            blocks = tuple(int(block) for block in entry.get("hash_ids", ()))
            line = _line(
                float(entry["timestamp"]) / 1e3,
                int(entry["input_length"]),
                int(entry["output_length"]),
                blocks,
            )
            if line is not None and "block_tokens" in entry:
                line = replace(
                    line,
                    block_tokens=min(MOST_TOKENS, max(1, int(entry["block_tokens"]))),
                    tenant=str(entry["tenant"])[:64],
                    tier=Tier(entry["tier"]),
                )
            yield number, line
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            yield number, None


def _csv_lines(file: Iterator[str], path: Path) -> Iterator[tuple[int, TraceLine | None]]:
    reader = csv.DictReader(file)
    if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(reader.fieldnames or ()):
        raise UsageError(
            f"{path} has no columns TIMESTAMP, ContextTokens and GeneratedTokens.",
            hint="Other formats: JSON lines with timestamp, input_length and output_length.",
        )
    for row in reader:
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"].strip())
            if (
                moment.tzinfo is None
            ):  # not this machine's time, whose clocks may change in the middle of a trace
                moment = moment.replace(tzinfo=UTC)
            time_s = moment.timestamp()
            yield reader.line_num, _line(time_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
        except (ValueError, TypeError, AttributeError):
            yield reader.line_num, None


def _line(time_s: float, prompt: int, output: int, blocks: tuple[int, ...]) -> TraceLine | None:
    if not (1 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS and isfinite(time_s)):
        return None
    return TraceLine(time_s, prompt, max(1, output), blocks)


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
