"""Policy sets: named choices of how a server schedules and routes, to be compared with each other.

A set holds only settings that differ from those of the server's start. The scheduler's part belongs to a
replica and the routing part to a request; see docs/objective.md for the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.core.engine_config import LengthBins, SchedulerConfig, TierShares
from penstock.core.errors import ConfigError
from penstock.core.objective import Weights

DEFAULT_POLICY = "default"  # the settings that the server was started with
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

RoutingPolicy = Literal["prefix-aware", "least-loaded", "power-of-two", "session-affinity", "round-robin"]


class RoutingWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routing settings of a policy set. None: as the server was started."""

    policy: RoutingPolicy | None = None
    recompute_weight: Annotated[float, Meta(ge=1, le=100)] | None = None  # of prefix-aware
    affinity_share: Annotated[float, Meta(ge=0, le=1)] | None = None  # of prefix-aware


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
                f"policies.{name} cannot be described: it stands for the settings of the command line.",
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
