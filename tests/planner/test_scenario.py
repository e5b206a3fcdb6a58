"""Scenarios, the command that runs them, and the search for faults."""

from __future__ import annotations

import gc
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from penstock.cli import simulate as command
from penstock.cli.commands import penstock
from penstock.core.errors import UsageError
from penstock.planner.scenario import Scenario, read_scenario, scenario_of, simulation_of
from penstock.simulator import Kill, simulate
from penstock.simulator.report import Outcome
from penstock.simulator.search import random_case, shrink, violation

DOCS = Path(__file__).parents[2] / "docs" / "simulator.md"
SMALL = '[traffic]\nrequests = 40\nrate = 20\ninput = 100\noutput = "5:20"\n'
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 500, "input_length": 600, "output_length": 6, "hash_ids": [1, 3]}
"""


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(penstock, ["simulate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_scenario_of_the_documentation(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "fleet.toml").write_text(text)
    config = read_scenario(tmp_path / "fleet.toml")
    assert (config.num_replicas, config.num_gateways, config.seed) == (4, 2, 1)
    assert config.faults == (Kill(30.0, 1),)
    assert [tenant.name for tenant in config.workload.tenants] == ["chat", "nightly"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"x": 1}, "unknown field `x`"),
        ({"model": {"name": "gpt-9"}}, "gpt-9 is not known"),
        ({"model": {"hardware": "abacus"}}, "abacus is not known"),
        ({"model": {"name": "llama-3.1-405b"}}, "leaves no memory for KV"),
        ({"fleet": {"replicas": 0}}, "at least one replica"),
        ({"traffic": {"rate": 0.0}}, "is not a positive number"),
        ({"traffic": {"input": "many"}}, "neither a number of tokens nor a range"),
        ({"faults": [{"kind": "kill", "at_s": 1.0, "replica": 9}]}, "names replica 9 of 1"),
        ({"faults": [{"kind": "restart-gateway", "at_s": 1.0, "gateway": 1}]}, "names gateway 1 of 1"),
        ({"model": {"host_memory_gib": -1.0}}, "is no amount of memory"),
        ({"fleet": {"heartbeat_s": 0.0}}, "no time is negative"),
        ({"faults": [{"kind": "flood", "at_s": 1.0}]}, "Invalid enum value 'flood'"),
        ({"faults": [{"kind": "slow", "at_s": 1.0, "until_s": 0.5}]}, "ends before it begins"),
        ({"faults": [{"kind": "slow", "at_s": 1.0, "factor": math.inf}]}, "at `$.faults[0].factor`"),
        ({"faults": [{"kind": "freeze", "at_s": math.nan}]}, "at `$.faults[0].at_s`"),
        ({"model": {"draft_acceptance": 5.0}}, "at `$.model.draft_acceptance`"),
        ({"model": {"host_memory_gib": 1e6}}, "is no amount of memory"),
        ({"traffic": {"session_share": -0.1}}, "at `$.traffic.session_share`"),
        ({"traffic": {"burst_share": math.nan}}, "at `$.traffic.burst_share`"),
        ({"traffic": {"zipf_exponent": -1e9}}, "at `$.traffic.zipf_exponent`"),
        ({"traffic": {"prefixes_per_tenant": 0}}, "at `$.traffic.prefixes_per_tenant`"),
        ({"traffic": {"mean_patience_s": 0.0}}, "at `$.traffic.mean_patience_s`"),
        ({"traffic": {"timeout_s": -1.0}}, "at `$.traffic.timeout_s`"),
        ({"traffic": {"tenants": []}}, "at `$.traffic.tenants`"),
        ({"traffic": {"tenants": [{"name": "a", "weight": 0.0}]}}, "at `$.traffic.tenants[0].weight`"),
        ({"traffic": {"input": "lognormal(100, 900, 8000)"}}, "no distribution of lengths"),
        ({"traffic": {"output": "lognormal(100, 1, 99)"}}, "no distribution of lengths"),
        ({"traffic": {"rate": 1e-9}}, "last longer than a year"),
        ({"traffic": {"trace": "a\0b"}}, "cannot be read: embedded null byte"),
        ({"model": {"tensor_parallel": 3}}, "The 32 heads of llama-3.1-8b cannot be cut over 3 devices"),
        ({"dispatch": {"routing_polcy": "round-robin"}}, "unknown field `routing_polcy`"),
        ({"dispatch": {"retries": {"max_attempts": 0}}}, "at `$.dispatch.retries.max_attempts`"),
        ({"dispatch": {"retries": {"budget_ratio": math.nan}}}, "at `$.dispatch.retries.budget_ratio`"),
        ({"dispatch": {"breaker": {"first_pause_s": -1.0}}}, "at `$.dispatch.breaker.first_pause_s`"),
        ({"dispatch": {"outliers": {"slow_factor": 0.0}}}, "at `$.dispatch.outliers.slow_factor`"),
        ({"dispatch": {"waiting": {"max_wait_s": math.nan}}}, "at `$.dispatch.waiting.max_wait_s`"),
        ({"dispatch": {"suspects": {"look_again_s": 0.0}}}, "at `$.dispatch.suspects.look_again_s`"),
        ({"fleet": {"autoscaler": {"drain_target_s": 0.0}}}, "at `$.fleet.autoscaler.drain_target_s`"),
        ({"fleet": {"autoscaler": {"max_growth": math.nan}}}, "max_growth above 1"),
        ({"release": {"at_s": 1.0, "settings": {"mirrored_share": 2.0}}}, "mirrored_share`"),
        ({"release": {"at_s": 1.0, "settings": {"canary_shares": [math.nan]}}}, "canary shares rise"),
        ({"release": {"at_s": 1.0, "settings": {"gates": {"max_ttft_ratio": math.nan}}}}, "max_ttft_ratio`"),
    ],
)
def test_bad_scenarios(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        simulation_of(scenario_of(values, "fleet.toml"))


def test_unknown_keys_are_refused_at_every_level() -> None:
    lenient, left = [], [msgspec.inspect.type_info(Scenario)]
    while left:
        each = left.pop()
        if isinstance(each, msgspec.inspect.StructType):
            lenient += [] if each.forbid_unknown_fields else [each.cls.__name__]
            left += [field.type for field in each.fields]
        elif isinstance(each, msgspec.inspect.UnionType):
            left += each.types
        elif isinstance(each, msgspec.inspect.VarTupleType):
            left.append(each.item_type)
    assert not lenient


def test_options_are_checked_like_the_values_of_the_scenario(tmp_path: Path) -> None:
    scenario = tmp_path / "fleet.toml"
    text = '[fleet]\nreplicas = 4\n[[faults]]\nkind = "kill"\nat_s = 1.0\nreplica = 3\n'
    scenario.write_text(text, encoding="utf-8-sig")
    for options, sentence in (
        (["--replicas", "2"], "names replica 3 of 2"),
        (["--rate", "nan"], "The rate nan is not a positive number"),
        (["--rate", "1e-300"], "last longer than a year"),
    ):
        code, _, told = run(str(scenario), *options)
        assert code != 0
        assert sentence in " ".join(told.split())


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(SMALL)
    for options in (["--replicas", "2"], ["--rate", "3"], ["--json"], [str(tmp_path / "fleet.toml")]):
        code, _, told = run("--fault-search", "1", *options)
        assert code != 0
        assert "have fleets of their own" in " ".join(told.split())


@pytest.mark.parametrize(("picture", "sentence"), [("x.nope", "written as .nope"), ("no/x.png", "no folder")])
def test_a_picture_is_refused_before_the_run(picture: str, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "fleet.toml").write_text(SMALL)
    code, report, told = run(str(tmp_path / "fleet.toml"), "--plot", str(tmp_path / picture))
    assert (code != 0, report) == (True, "")
    assert sentence in " ".join(told.split())


def test_a_quiet_scenario_that_takes_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas send heartbeats while nothing arrives."""

    def stop(*_: Any, **__: Any) -> None:
        raise UsageError("The run begins.")

    monkeypatch.setattr("penstock.simulator.simulate", stop)
    (tmp_path / "fleet.toml").write_text("[traffic]\nrequests = 10\nrate = 1e-5\n[fleet]\nreplicas = 3\n")
    _, _, told = run(str(tmp_path / "fleet.toml"))
    assert "10 requests will take about 50 minutes of one core." in " ".join(told.split())


def test_a_trace_is_replayed_with_its_prefixes(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(MOONCAKE)
    (tmp_path / "fleet.toml").write_text('[traffic]\ntrace = "requests.jsonl"\n')
    ended: list[Outcome] = []
    report = simulate(read_scenario(tmp_path / "fleet.toml"), on_outcome=ended.append)
    assert [len(outcome.token_ids) for outcome in ended] == [5, 6]
    assert [outcome.arrival.time_s for outcome in ended] == [0.0, 0.5]
    assert report.cached_tokens == 512  # the block that both begin with


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl", "requests.jsonl"])
def test_the_examples_of_every_format_are_simulated(name: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(f'[traffic]\ntrace = "{DOCS.parent / "examples" / name}"\n')
    report = simulate(read_scenario(tmp_path / "fleet.toml"))
    assert report.num_answered == 24
    assert (report.cached_share > 0.1) is (name != "azure.csv")


def test_requests_that_are_a_year_apart(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 8, "output_length": 2}\n'
    (tmp_path / "trace.jsonl").write_text(line % 0 + line % 10**14)
    with pytest.raises(UsageError, match="more than a year apart") as caught:
        simulation_of(scenario_of({"traffic": {"trace": "trace.jsonl"}}, "test"), tmp_path)
    assert "not in milliseconds" in str(caught.value.hint)


def test_damaged_lines_are_told_by_number(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(MOONCAKE * 15 + "broken\n")
    (tmp_path / "fleet.toml").write_text('[traffic]\ntrace = "requests.jsonl"\n')
    code, _, errors = run(str(tmp_path / "fleet.toml"))
    assert code == 0
    assert "line 31 of" in errors


def test_the_search_for_policies_tells_damaged_lines_too(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(MOONCAKE * 15 + "broken\n")
    (tmp_path / "fleet.toml").write_text('[traffic]\ntrace = "requests.jsonl"\n')
    result = CliRunner().invoke(penstock, ["tune", str(tmp_path / "fleet.toml"), "--evaluations", "2"])
    assert result.exit_code == 0, result.stderr
    assert "line 31 of" in result.stderr


def test_host_memory_delays_and_every_kind_of_fault() -> None:
    kinds = ("kill", "freeze", "slow", "lose-kv-events", "restart-gateway", "step-clock")
    values = {
        "model": {"host_memory_gib": 2.0, "draft_acceptance": 0.7},
        "traffic": {"requests": 40, "rate": 20.0, "input": 100, "output": "5:20"},
        "fleet": {"replicas": 2, "message_delay_s": 0.05, "heartbeat_s": 0.25, "start_s": 1.0},
        "faults": [{"kind": kind, "at_s": 0.3 + 0.2 * place} for place, kind in enumerate(kinds)],
    }
    config = simulation_of(scenario_of(values, "fleet.toml"))
    assert config.replica.num_host_blocks == 1024  # of 2 MiB
    assert (config.times.message_delay_s, config.times.heartbeat_s, config.times.start_s) == (0.05, 0.25, 1.0)
    assert len({type(fault) for fault in config.faults}) == 5  # a frozen replica is a very slow one
    assert simulate(config).num_requests == 40


def test_limits_of_tenants_are_those_of_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    tenants = '[[traffic.tenants]]\nname = "big"\nweight = 3.0\n[[traffic.tenants]]\nname = "small"\n'
    limits = "[limits.workspace.overrides.big]\nrequests_per_minute = 6\n"
    path.write_text(SMALL + tenants + limits)
    code, output, errors = run(str(path), "--json")
    assert code == 0, errors
    [report] = json.loads(output).values()
    assert report["rejected"]["rate_limit_exceeded"] > 15
    assert report["finished"]["stop"] + report["rejected"]["rate_limit_exceeded"] == 40
    path.write_text(SMALL + "[limits.key]\nconcurrent_requests = 1\noutput_tokens_per_minute = 100000\n")
    code, output, _ = run(str(path), "--json")
    assert 0 < json.loads(output)[str(path)]["finished"]["stop"] < 40
    path.write_text(SMALL + "[limits.key]\nrequests_per_hour = 1\n")
    code, _, errors = run(str(path))
    assert code != 0
    assert "requests_per_hour" in errors
    path.write_text(SMALL + "[limits.key]\ndollars_per_day = 1.0\n")
    assert "not simulated" in run(str(path))[2]


def test_prompts_have_a_pool_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[traffic]\nrequests = 20\nrate = 20\ninput = 2000\noutput = 9\n'
                    "[fleet]\nprefill_replicas = 1\n")  # fmt: skip
    code, output, _ = run(str(path), "--json")
    assert code == 0
    [report] = json.loads(output).values()
    assert len(report["replicas"]) == 2
    assert report["num_moved_tokens"] > 15 * 2000
    path.write_text("[fleet]\nprefill_replicas = 1\n[fleet.autoscaler]\nmax_replicas = 2\n")
    assert "has one pool" in run(str(path))[2]


def test_the_command(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(SMALL)
    other.write_text(SMALL + "[fleet]\nreplicas = 2\n")
    code, output, _ = run(str(one), "--requests", "20")
    assert code == 0
    assert "20 requests" in output
    code, output, _ = run(str(one), str(other), "--json")
    assert code == 0
    reports = json.loads(output)
    assert len(reports[str(other)]["replicas"]) == 2
    code, output, _ = run(str(one), str(other))
    assert code == 0
    assert "TTFT p99, ms" in output


def test_search_finds_nothing_where_nothing_is_wrong() -> None:
    code, output, _ = run("--fault-search", "4", "--requests", "30", "--seed", "7")
    assert code == 0
    assert "4 fleets and 120 requests, seeds 7 to 10: no promise was broken." in output


def test_search_with_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find what one process finds: nothing, or the same first seed."""
    monkeypatch.setattr("penstock.cli.simulate._SEEDS_PER_TASK", 2)
    options = ("--requests", "10", "--workers", "2")
    code, output, errors = run("--fault-search", "6", "--seed", "7", *options)
    assert code == 0, errors
    assert "6 fleets and 60 requests, seeds 7 to 12: no promise was broken." in output
    assert run("--workers", "2")[0] != 0  # there is nothing to share


@pytest.mark.parametrize("workers", [1, 2])
def test_the_broken_promise_with_the_lowest_seed_is_reported(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_SEEDS_PER_TASK", 2)
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda size, *_: ThreadPoolExecutor(size))
    monkeypatch.setattr(
        command, "_violation", lambda case: "a fault" if case.seed >= 5 and case.seed % 2 else None
    )
    code, output, errors = run("--fault-search", "12", "--requests", "3", "--workers", str(workers))
    assert (code != 0, output) == (True, "")
    assert "Seed 5: a fault, with 1 requests" in " ".join(errors.split())
    assert [path.name for path in tmp_path.iterdir()] == ["fault-case-5.json"]


def test_a_killed_process_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_follow_parent", os.abort)
    code, _, errors = run("--fault-search", "16", "--requests", "1", "--workers", "2")
    assert code != 0
    assert "A process of the search was killed" in errors


def test_search_finds_and_shrinks_a_repeated_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that sends a token again after a failure."""
    note = Outcome.note

    def repeats(self: Outcome, event: Any, now: float) -> None:
        if self.num_failures and event.token_ids and not self.token_ids[2:]:
            self.token_ids.append(event.token_ids[0])
            self.token_times_s.append(now)
        note(self, event, now)

    monkeypatch.setattr(Outcome, "note", repeats)
    monkeypatch.chdir(tmp_path)
    failing = next(case for seed in range(60) if violation(case := random_case(seed, 30)))
    code, _, errors = run("--fault-search", "1", "--requests", "30", "--seed", str(failing.seed))
    assert code != 0
    assert "token" in errors
    [written] = tmp_path.glob("fault-case-*.json")
    smallest = msgspec.json.decode(written.read_bytes(), type=type(failing))
    assert smallest.num_faults <= 2
    assert smallest.num_requests <= failing.num_requests
    assert run("--fault-case", str(written))[0] != 0
    monkeypatch.undo()
    assert run("--fault-case", str(written))[0] == 0


def test_shrinking_ends_at_the_smallest_case() -> None:
    case = next(case for seed in range(100) if len((case := random_case(seed, 64)).kills) >= 2)
    smallest = shrink(case, lambda each: len(each.kills) >= 1 and each.num_requests >= 3)
    assert (smallest.num_requests, len(smallest.kills), smallest.num_faults) == (3, 1, 1)


def test_a_replica_may_be_killed_twice_before_anybody_notices() -> None:
    config = simulation_of(
        scenario_of(
            {
                "traffic": {"requests": 30, "rate": 20.0, "input": 50, "output": 10},
                "fleet": {"replicas": 2},
                "faults": [{"kind": "kill", "at_s": at_s, "replica": 0} for at_s in (0.5, 0.6)],
            },
            "here",
        )
    )
    assert simulate(config).num_answered == 30


def test_a_file_that_is_no_case(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text("{}")
    code, _, errors = run("--fault-case", str(path))
    assert code != 0
    assert "holds no case" in errors


def test_no_garbage_is_looked_for_while_a_scenario_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []

    def interrupted(*arguments: object, **settings: object) -> None:
        looked.append(gc.isenabled())
        raise UsageError("That is enough.")

    monkeypatch.setattr("penstock.simulator.simulate", interrupted)
    code, _, errors = run()
    assert (code, looked, gc.isenabled()) == (1, [False], True), errors
