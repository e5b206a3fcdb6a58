"""Reads a scenario for the simulator: a TOML file with a model, its hardware, a fleet, traffic and faults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.control.autoscaler import AutoscalerConfig
from penstock.control.release import ReleaseConfig
from penstock.core.engine_config import SchedulerConfig
from penstock.core.errors import UsageError
from penstock.core.objective import ObjectiveSettings
from penstock.core.request import Tier
from penstock.dispatch import DispatchConfig
from penstock.planner.capacity import BLOCK_TOKENS
from penstock.planner.hardware import HARDWARE, KV_FORMATS, WEIGHT_FORMATS
from penstock.planner.roofline import Layout, RooflineCost
from penstock.planner.shapes import KNOWN_MODELS, known_shape
from penstock.planner.traffic import MOST_TOKENS, RecordedArrivals, parse_lengths, read_trace
from penstock.simulator import (
    ControlTimes,
    Kill,
    LogNormal,
    LoseKVEvents,
    ReplicaConfig,
    SimulationConfig,
    SlowDown,
    Tenant,
    Workload,
)
from penstock.simulator.releases import SimulatedRelease
from penstock.simulator.transfers import KVLink
from penstock.simulator.workload import Fault, Lengths, RestartGateway, StepClock

_CONTEXT = 2048  # tokens: what layers with windows or states are worth in blocks
_HOST_BYTES_PER_S = 25e9  # PCIe 4.0 with 16 lanes
_KV_GBYTES_PER_S = 10.0  # a 100 Gbit/s network
_FROZEN_S = 10.0  # unless until_s says otherwise
_FROZEN_FACTOR = 1e4
_MOST_SIGMA = 10.0
_LOG_NORMAL = re.compile(r"lognormal\((\d+), *(\d+(?:\.\d+)?), *(\d+)\)")


_LONGEST_S = 366 * 86_400.0  # of virtual time
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e8)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e8)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelSection(_Section, frozen=True, kw_only=True):
    name: str = "llama-3.1-8b"
    hardware: str = "h200"
    format: str = "bfloat16"
    kv_format: str = "bfloat16"
    tensor_parallel: int = 1
    draft_acceptance: _Share | None = None
    host_memory_gib: float = 0.0  # for blocks that the device has no room for


class TenantSection(_Section, frozen=True, kw_only=True):
    name: str
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    tier: Tier = Tier.DEFAULT


class TrafficSection(_Section, frozen=True, kw_only=True):
    requests: int = 1000
    rate: float = 10.0
    input: int | str = "lognormal(300, 1.0, 8000)"  # tokens
    output: int | str = "lognormal(150, 0.8, 1000)"
    prefix: int | str | None = None  # tokens that requests of one tenant share
    prefixes_per_tenant: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    zipf_exponent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    session_share: _Share = 0.0
    burst_share: _Share = 0.0
    timeout_s: _PositiveSeconds | None = None
    mean_patience_s: _PositiveSeconds | None = None
    tenants: Annotated[tuple[TenantSection, ...], msgspec.Meta(min_length=1)] = (
        TenantSection(name="default"),
    )
    trace: str | None = None  # a file with requests; its times and lengths take the place of the above


class FleetSection(_Section, frozen=True, kw_only=True):
    replicas: int = 1
    prefill_replicas: int = 0  # that compute long prompts for `replicas`, which then decode
    # Between replicas; None: replicas without a pool for prompts move no KV.
    kv_gbytes_per_s: float | None = None
    gateways: int = 1
    autoscaler: AutoscalerConfig | None = None
    heartbeat_s: float = 0.1
    message_delay_s: float = 0.02  # of heartbeats and KV events
    start_s: _Seconds = 30.0  # of a replica


class FaultSection(_Section, frozen=True, kw_only=True):
    kind: Literal["kill", "freeze", "slow", "lose-kv-events", "restart-gateway", "step-clock"]
    at_s: _Seconds
    until_s: _Seconds | None = None
    replica: int = 0
    factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 4.0  # of slow
    share: _Share = 0.5  # of lose-kv-events
    restarts_after_s: _Seconds | None = 10.0  # of kill
    gateway: int = 0  # of restart-gateway
    seconds: _Seconds = 1.0  # of step-clock


class ReleaseSection(_Section, frozen=True, kw_only=True):
    at_s: float
    slowdown: float = 1.0  # of the candidate's steps
    error_share: float = 0.0  # of the candidate's attempts
    diverging_share: float = 0.0  # of its answers to mirrored requests
    settings: ReleaseConfig = ReleaseConfig()


class Scenario(_Section, frozen=True, kw_only=True):
    model: ModelSection = ModelSection()
    traffic: TrafficSection = TrafficSection()
    fleet: FleetSection = FleetSection()
    dispatch: DispatchConfig = DispatchConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    objective: ObjectiveSettings = ObjectiveSettings()
    faults: tuple[FaultSection, ...] = ()
    release: ReleaseSection | None = None
    limits: dict[str, Any] = {}  # as in the settings of a gateway; tenants are workspaces with one key each
    seed: int = 0


def read_scenario(path: Path, warn: Callable[[str], None] = lambda text: None) -> SimulationConfig:
    """Read a scenario and describe its simulation. A wrong value is a UsageError that names it."""
    return simulation_of(load_scenario(path), path.parent, warn)


def load_scenario(path: Path) -> Scenario:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}.") from error
    return scenario_of(values, str(path))


def scenario_of(values: dict[str, Any], where: str) -> Scenario:
    try:
        return msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where} is no scenario: {error}.", hint="docs/simulator.md lists its keys."
        ) from error


def simulation_of(
    scenario: Scenario, folder: Path = Path(), warn: Callable[[str], None] = lambda text: None
) -> SimulationConfig:
    """Describe the simulation of a scenario. Relative paths are looked for in `folder`; `warn` is told about damaged
    lines of a trace."""
    fleet, traffic = scenario.fleet, scenario.traffic
    if not 1 <= fleet.replicas <= 100_000 or not 1 <= fleet.gateways <= 1000 or traffic.requests < 1:
        raise UsageError("A scenario has at least one replica, one gateway and one request.")
    if not 0 < traffic.rate <= 1e9:
        raise UsageError(f"The rate {traffic.rate} is not a positive number of requests per second.")
    if traffic.trace is None and traffic.requests / traffic.rate > _LONGEST_S:
        raise UsageError(
            f"{traffic.requests:,} requests at {traffic.rate:g} per second last longer than a year.",
            hint="Raise traffic.rate, or lower traffic.requests.",
        )
    layout = _layout(scenario.model)
    kv_tokens = layout.kv_tokens(_CONTEXT)
    if kv_tokens < BLOCK_TOKENS:
        raise UsageError(
            f"{layout.model.name} leaves no memory for KV on {layout.tensor_parallel} × {layout.hardware.name}.",
            hint="Raise model.tensor_parallel, or choose a smaller format.",
        )
    block_bytes = layout.kv_bytes_per_token * BLOCK_TOKENS
    host_bytes = scenario.model.host_memory_gib * (1 << 30)
    if not 0 <= host_bytes < 1 << 45:
        raise UsageError(f"model.host_memory_gib = {scenario.model.host_memory_gib} is no amount of memory.")
    if not 0 < fleet.heartbeat_s <= 60 or not 0 <= fleet.message_delay_s <= 60:
        raise UsageError(
            "fleet.heartbeat_s and fleet.message_delay_s are at most 60, and no time is negative."
        )
    if fleet.prefill_replicas and fleet.autoscaler is not None:
        raise UsageError("The autoscaler has one pool: leave fleet.prefill_replicas or fleet.autoscaler out.")
    if not 0 <= fleet.prefill_replicas <= 100_000 or (
        fleet.kv_gbytes_per_s is not None and not 0 < fleet.kv_gbytes_per_s <= 1e6
    ):
        raise UsageError("fleet.prefill_replicas and fleet.kv_gbytes_per_s are positive numbers.")
    gbytes_per_s = fleet.kv_gbytes_per_s or (_KV_GBYTES_PER_S if fleet.prefill_replicas else None)
    workload = _workload(traffic)
    recorded = None if traffic.trace is None else _recorded(folder / traffic.trace, warn)
    return SimulationConfig(
        workload=workload if recorded is None else recorded.described_by(workload),
        arrivals=recorded,
        replica=ReplicaConfig(
            num_blocks=kv_tokens // BLOCK_TOKENS,
            max_model_len=layout.model.max_positions,
            cost=RooflineCost(layout, serves=True),
            scheduler=scenario.scheduler,
            draft_acceptance=scenario.model.draft_acceptance,
            num_host_blocks=int(host_bytes / block_bytes),
            block_copy_s=block_bytes / _HOST_BYTES_PER_S if host_bytes else None,
            counts_decodes=not any(fault.kind == "step-clock" for fault in scenario.faults),
        ),
        times=ControlTimes(
            heartbeat_s=fleet.heartbeat_s, message_delay_s=fleet.message_delay_s, start_s=fleet.start_s
        ),
        num_replicas=fleet.replicas,
        num_prefill_replicas=fleet.prefill_replicas,
        kv_link=None if gbytes_per_s is None else KVLink(int(layout.kv_bytes_per_token), gbytes_per_s * 1e9),
        num_gateways=fleet.gateways,
        dispatch=scenario.dispatch,
        autoscaler=fleet.autoscaler,
        faults=tuple(_fault(fault, fleet) for fault in scenario.faults),
        release=None if scenario.release is None else _release(scenario.release, fleet),
        objective=scenario.objective,
        seed=scenario.seed,
    )


def _release(release: ReleaseSection, fleet: FleetSection) -> SimulatedRelease:
    if fleet.autoscaler is not None or fleet.prefill_replicas:
        raise UsageError(
            "A release has one pool of fixed size: leave fleet.autoscaler and prefill_replicas out."
        )
    shares = release.error_share, release.diverging_share
    if (
        not 0 <= release.at_s <= 1e9
        or not 0.01 <= release.slowdown <= 100
        or not all(0 <= x <= 1 for x in shares)
    ):
        raise UsageError("release.at_s is a time, slowdown from 0.01 to 100, and shares are from 0 to 1.")
    return SimulatedRelease(
        at_s=release.at_s,
        config=release.settings,
        slowdown=release.slowdown,
        error_share=release.error_share,
        diverging_share=release.diverging_share,
    )


def _layout(model: ModelSection) -> Layout:
    shape, hardware = known_shape(model.name), model.hardware.lower()
    for name, known in (
        (model.name if shape is None else shape.name, KNOWN_MODELS),
        (hardware, HARDWARE),
        (model.format, WEIGHT_FORMATS),
        (model.kv_format, KV_FORMATS),
    ):
        if name not in known:
            raise UsageError(f"{name} is not known.", hint=f"Known are {', '.join(known)}.")
    assert shape is not None
    if not 1 <= model.tensor_parallel <= 64:
        raise UsageError(f"tensor_parallel = {model.tensor_parallel} is not from 1 to 64.")
    if shape.num_heads % model.tensor_parallel:
        raise UsageError(
            f"The {shape.num_heads} heads of {shape.name} cannot be cut over {model.tensor_parallel} devices.",
            hint="model.tensor_parallel must divide the number of heads.",
        )
    return Layout(
        shape,
        HARDWARE[hardware],
        WEIGHT_FORMATS[model.format],
        KV_FORMATS[model.kv_format],
        model.tensor_parallel,
    )


def _workload(traffic: TrafficSection) -> Workload:
    return Workload(
        num_requests=traffic.requests,
        requests_per_s=traffic.rate,
        prompt_tokens=_lengths(traffic.input, "traffic.input"),
        output_tokens=_lengths(traffic.output, "traffic.output"),
        tenants=tuple(Tenant(each.name, each.weight, each.tier) for each in traffic.tenants),
        prefix_tokens=None if traffic.prefix is None else _lengths(traffic.prefix, "traffic.prefix"),
        prefixes_per_tenant=traffic.prefixes_per_tenant,
        zipf_exponent=traffic.zipf_exponent,
        session_share=traffic.session_share,
        burst_share=traffic.burst_share,
        timeout_s=traffic.timeout_s,
        mean_patience_s=traffic.mean_patience_s,
    )


def _lengths(value: int | str, key: str) -> Lengths:
    found = _LOG_NORMAL.fullmatch(str(value))
    if found is None:
        return parse_lengths(str(value), key)[0]
    median, sigma, maximum = int(found[1]), float(found[2]), int(found[3])
    if not 1 <= median <= maximum <= MOST_TOKENS or sigma > _MOST_SIGMA:
        raise UsageError(
            f"{key} = {value} is no distribution of lengths.",
            hint=f"Give a median, a sigma up to {_MOST_SIGMA:g}, and a maximum from the median to {MOST_TOKENS:,}.",
        )
    return LogNormal(median, sigma, maximum)


def _fault(fault: FaultSection, fleet: FleetSection) -> Fault:
    num_replicas = fleet.replicas + fleet.prefill_replicas
    if fault.until_s is not None and fault.until_s <= fault.at_s:
        raise UsageError(f"The fault at {fault.at_s} s ends before it begins, at {fault.until_s} s.")
    if not 0 <= fault.replica < num_replicas:
        raise UsageError(f"The fault at {fault.at_s} s names replica {fault.replica} of {num_replicas}.")
    if not 0 <= fault.gateway < fleet.gateways:
        raise UsageError(f"The fault at {fault.at_s} s names gateway {fault.gateway} of {fleet.gateways}.")
    if fault.kind == "restart-gateway":
        return RestartGateway(fault.at_s, fault.gateway)
    if fault.kind == "kill":
        return Kill(fault.at_s, fault.replica, restarts_after_s=fault.restarts_after_s)
    if fault.kind == "freeze":
        until_s = fault.at_s + _FROZEN_S if fault.until_s is None else fault.until_s
        return SlowDown(fault.at_s, fault.replica, _FROZEN_FACTOR, until_s)
    if fault.kind == "step-clock":
        return StepClock(fault.at_s, fault.replica, fault.seconds)
    if fault.kind == "slow":
        return SlowDown(fault.at_s, fault.replica, fault.factor, fault.until_s)
    until_s = fault.until_s if fault.until_s is not None else fault.at_s + 10.0
    return LoseKVEvents(fault.at_s, until_s, fault.share)


def _recorded(path: Path, warn: Callable[[str], None]) -> RecordedArrivals:
    trace = read_trace(path)
    if (warning := trace.warning(path)) is not None:
        warn(warning)
    recorded = RecordedArrivals(trace.lines)
    if recorded.duration_s > _LONGEST_S:
        raise UsageError(
            f"The requests of {path} are more than a year apart.",
            hint="A timestamp is wrong, or not in milliseconds.",
        )
    return recorded
