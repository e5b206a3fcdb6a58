"""What is written down of requests, and what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import ConfigError, EngineUnavailable
from penstock.core.request import FinishReason, Request, SamplingParams, Tier
from penstock.dispatch.actions import Attempt
from penstock.gateway.history.requests import RequestRecorder
from penstock.planner.scenario import read_scenario
from penstock.planner.traffic import read_trace
from penstock.simulator import simulate

PREFIX = tuple(range(1000, 1128))  # two blocks


def request(name: str, *tokens: int, tenant: str = "acme", salt: str = "acme") -> Request:
    return Request(
        id=name,
        prompt_token_ids=(*PREFIX, *tokens),
        sampling=SamplingParams(max_tokens=9),
        tenant=tenant,
        cache_salt=salt,
        tier=Tier.PRIORITY,
    )


def ended(request: Request, num_tokens: int, reason: FinishReason | None = FinishReason.STOP) -> Attempt:
    error = None if reason is not None else EngineUnavailable("gone", retry_after_s=1.0)
    return Attempt(
        request=request, replica_id="r", revision="", ttft_s=0.1, itl_s=None, finish_reason=reason, error=error,
        output_token_ids=tuple(range(num_tokens)),
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    now = 100.0
    recorder = RequestRecorder(tmp_path / "requests.jsonl", lambda: now)
    first, second, other = (
        request("a", 1),
        request("b", 2, 3),
        request("c", 4, tenant="umbrella", salt="umbrella"),
    )
    for each in (first, second, other):
        now += 0.25
        recorder.arrived(each, 0)
    recorder.ended(ended(second, 2, None))  # its replica died; another goes on
    recorder.ended(ended(second, 3))
    recorder.ended(ended(first, 4))
    recorder.ended(ended(other, 5, FinishReason.ABORT))
    recorder.ended(ended(request("unknown"), 5))
    recorder.close()
    recorder.ended(ended(first, 4))
    return tmp_path / "requests.jsonl"


def test_lengths_times_and_shared_prefixes_are_recorded(recorded: Path) -> None:
    trace = read_trace(recorded)
    assert [line.time_s for line in trace.lines] == [0.25, 0.5, 0.75]
    assert [(line.prompt_tokens, line.output_tokens) for line in trace.lines] == [
        (129, 4),
        (130, 5),
        (129, 5),
    ]
    first, second, other = trace.lines
    assert len(first.blocks) == 2
    assert first.blocks == second.blocks
    assert not set(first.blocks) & set(other.blocks)  # tenants share no prefix, whatever they send
    assert first.tenant == second.tenant != other.tenant
    assert {line.tier for line in trace.lines} == {Tier.PRIORITY}


def test_no_names_tokens_or_plain_hashes_are_recorded(recorded: Path, tmp_path: Path) -> None:
    text = recorded.read_text()
    assert "acme" not in text
    for line in map(json.loads, text.splitlines()):
        assert set(line) == {
            *("timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "tenant", "tier"),
        }
        assert not set(line["hash_ids"]) & set(PREFIX)
    assert os.stat(recorded).st_mode & 0o077 == 0
    again = RequestRecorder(tmp_path / "again.jsonl")
    again.arrived(request("a", 1), 0)
    again.ended(ended(request("a", 1), 1))
    [line] = map(json.loads, (tmp_path / "again.jsonl").read_text().splitlines())
    assert not set(line["hash_ids"]) & set(read_trace(recorded).lines[0].blocks)  # another secret
    again.close()


def test_a_recording_is_simulated_with_its_prefixes_and_tenants(recorded: Path) -> None:
    scenario = recorded.with_name("fleet.toml")
    scenario.write_text('[traffic]\ntrace = "requests.jsonl"\n')
    config = read_scenario(scenario)
    assert config.arrivals is not None
    assert len({arrival.request.tenant for arrival in config.arrivals}) == 2
    report = simulate(config)
    assert report.num_answered == 3
    assert report.cached_tokens == len(PREFIX)
    assert list(report.latency_by_tier) == ["priority"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot record requests"):
        RequestRecorder(tmp_path / "none" / "requests.jsonl")


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RequestRecorder(Path("/dev/full"))
    for name in "ab":
        recorder.arrived(request(name), 0)
        recorder.ended(ended(request(name), 1))
    assert [record.message for record in caplog.records] == [
        "requests are no longer recorded: No space left on device"
    ]


def test_damaged_lines_are_named(recorded: Path) -> None:
    lines = recorded.read_text().splitlines() * 20
    lines[4] = lines[4].replace('"priority"', '"urgent"')
    lines[9] = msgspec.json.encode({"timestamp": "inf", "input_length": 5, "output_length": 5}).decode()
    recorded.write_text("\n".join(lines))
    assert read_trace(recorded).warning(Path("x")) == "lines 5, 10 of x are no requests and were left out."
