"""The scheduling objective: one number that says how well requests were served, the smaller the better. Policy
sets: named choices of how a server schedules and routes, to be compared by it.

    objective = ttft · TTFT/target + itl · ITL/target + idle · (1 − utilisation) + drops · share of dropped requests

The first two terms are means over requests. Each request counts with at most `MAX_RATIO` times its target, so that a
single request that waited for minutes does not hide the times of all others. A tier has its own targets. The
objective of all tiers is the mean over their requests, weighted by tier. Pure functions without a clock.

A set holds only settings that differ from the server's own. The scheduler's part belongs to a replica
and the routing part to a request; see docs/objective.md for the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.core.engine_config import LengthBins, SchedulerConfig, TierShares
from penstock.core.errors import ConfigError
from penstock.core.figures import Positive, ShareOrZero
from penstock.core.request import Tier

MAX_RATIO = 10.0

_Weight = Annotated[float, Meta(ge=0, le=1e6)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The weights of the four terms."""

    ttft: _Weight = 1.0
    itl: _Weight = 1.0
    idle: _Weight = 0.2
    drops: _Weight = 10.0


class TierTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_s: _Seconds = 1.0
    itl_s: _Seconds = 0.1  # mean time between the tokens of one answer
    weight: _Weight = 1.0  # of a request of this tier, in the objective of all tiers


class Targets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    priority: TierTarget = TierTarget(ttft_s=0.5, itl_s=0.05)
    default: TierTarget = TierTarget()
    batch: TierTarget = TierTarget(ttft_s=30.0, itl_s=1.0)

    def of(self, tier: Tier) -> TierTarget:
        target: TierTarget = getattr(self, tier.value)
        return target


class ObjectiveSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights: Weights = Weights()
    targets: Targets = Targets()
    # Tokens per second that one replica can compute. None: what it computes per second of its steps, so that
    # utilisation is the share of time in which it computes.
    capacity_tokens_per_s: Positive | None = None


class TierSums(msgspec.Struct):
    """Sums over the requests of one tier. Sums of several windows or gateways can be added."""

    num_requests: int = 0  # that ended; requests whose client disconnected do not count
    num_dropped: int = 0  # refused, failed or too late
    num_begun: int = 0  # that have a time to first token
    ttft: float = 0.0  # sum of the shares of the target
    num_paced: int = 0  # that have a time between tokens
    itl: float = 0.0

    def add(
        self, target: TierTarget, ttft_s: float | None, itl_s: float | None, *, is_dropped: bool = False
    ) -> None:
        self.num_requests += 1
        self.num_dropped += is_dropped
        if ttft_s is not None:
            self.num_begun += 1
            self.ttft += min(MAX_RATIO, ttft_s / target.ttft_s)
        if itl_s is not None:
            self.num_paced += 1
            self.itl += min(MAX_RATIO, itl_s / target.itl_s)

    def plus(self, other: TierSums) -> TierSums:
        return TierSums(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


SumsByTier = Mapping[Tier, TierSums]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The weighted terms of the objective."""

    ttft: float = 0.0
    itl: float = 0.0
    idle: float = 0.0
    drops: float = 0.0
    total: float = 0.0


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of all tiers together, and of each tier that had requests. Without requests, the terms of times and
    drops are zero."""

    overall: Terms
    by_tier: dict[Tier, Terms] = {}
    utilisation: float = 0.0

    @property
    def total(self) -> float:
        return self.overall.total


def utilisation_of(tokens_per_s: float, capacity_tokens_per_s: float) -> float:
    """Return the used share of what a replica can compute. Both figures are of one replica."""
    return min(1.0, max(0.0, tokens_per_s / capacity_tokens_per_s)) if capacity_tokens_per_s > 0 else 0.0


def objective_of(sums: SumsByTier, settings: ObjectiveSettings, utilisation: float) -> Objective:
    weights, targets = settings.weights, settings.targets
    idle = weights.idle * (1.0 - min(1.0, max(0.0, utilisation)))
    by_tier = {tier: _terms(each, weights, idle) for tier, each in sums.items() if each.num_requests}
    shares = {tier: sums[tier].num_requests * targets.of(tier).weight for tier in by_tier}
    whole = sum(shares.values())
    mean = {
        name: sum(getattr(by_tier[tier], name) * share for tier, share in shares.items()) / whole
        for name in ("ttft", "itl", "drops")
        if whole
    }
    return Objective(overall=_summed(idle, **mean), by_tier=by_tier, utilisation=utilisation)


def added(parts: Iterable[SumsByTier]) -> dict[Tier, TierSums]:
    """Add the sums of several windows."""
    total: dict[Tier, TierSums] = {}
    for part in parts:
        for tier, sums in part.items():
            total[tier] = total[tier].plus(sums) if tier in total else sums.plus(TierSums())
    return total


def _terms(sums: TierSums, weights: Weights, idle: float) -> Terms:
    return _summed(
        idle,
        ttft=weights.ttft * sums.ttft / max(1, sums.num_begun),
        itl=weights.itl * sums.itl / max(1, sums.num_paced),
        drops=weights.drops * sums.num_dropped / sums.num_requests,
    )


def _summed(idle: float, ttft: float = 0.0, itl: float = 0.0, drops: float = 0.0) -> Terms:
    return Terms(ttft=ttft, itl=itl, idle=idle, drops=drops, total=ttft + itl + idle + drops)


DEFAULT_POLICY = "default"  # the settings that the server was started with
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

RoutingPolicy = Literal["prefix-aware", "least-loaded", "power-of-two", "session-affinity", "round-robin"]


class RoutingWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routing settings of a policy set. None: as the server was started."""

    policy: RoutingPolicy | None = None
    recompute_weight: Annotated[float, Meta(ge=1, le=100)] | None = None  # of prefix-aware
    affinity_share: ShareOrZero | None = None  # of prefix-aware


class PolicySet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy set. None: as the server was started."""

    length_bins: LengthBins | None = None
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None  # the chunk size
    itl_target_ms: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    aging_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    preempt_batch: bool | None = None
    tier_shares: TierShares | None = None
    max_draft_tokens: Annotated[int, Meta(ge=0, le=64)] | None = None
    routing: RoutingWeights | None = None
    weights: Weights | None = None  # of the objective; judges an experiment in which this is the first set

    def engine_settings(self) -> dict[str, Any]:
        """Return the settings of a replica that differ from the server's."""
        values = msgspec.structs.asdict(self)
        return {
            name: value for name, value in values.items() if value is not None and name not in _NOT_OF_ENGINES
        }

    def applied_to(self, config: SchedulerConfig) -> SchedulerConfig:
        return msgspec.structs.replace(config, **self.engine_settings())

    def to_toml(self, name: str) -> str:
        """Return the set as a table of the settings file."""
        lines = [f"[policies.{_quoted(name)}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in self.engine_settings().items()]
        for part in ("routing", "weights"):
            inside = getattr(self, part)
            if inside is not None:
                given = msgspec.structs.asdict(inside)
                lines += [f"\n[policies.{_quoted(name)}.{part}]"]
                lines += [f"{key} = {_toml(value)}" for key, value in given.items() if value is not None]
        return "\n".join(lines) + "\n"


_NOT_OF_ENGINES = ("routing", "weights")


def check_names(policies: Mapping[str, PolicySet]) -> None:
    """Raise ConfigError for a name that cannot be used."""
    for name in policies:
        if name == DEFAULT_POLICY:
            raise ConfigError(
                f"policies.{name} cannot be described: the name means the settings of the command line.",
                param=f"policies.{name}",
                hint="Choose another name.",
            )
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"policies.{name} is no name: it has letters, digits, '.', '_' and '-', at most 64.",
                param=f"policies.{name}",
            )


def policy_of(policies: Mapping[str, PolicySet], name: str) -> PolicySet:
    """Return the policy set of this name. Raises ConfigError if there is none."""
    if name == DEFAULT_POLICY:
        return PolicySet()
    if name not in policies:
        known = ", ".join((DEFAULT_POLICY, *sorted(policies)))
        raise ConfigError(
            f"There is no policy set {name[:64]!r}.",
            hint=f"There are: {known}. Describe one in the settings file, as [policies.{name[:64]}].",
        )
    return policies[name]


def _quoted(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"
