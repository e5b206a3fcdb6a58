"""Which names stand for which models, who may use them and where: the table `[models]` of the settings file.

    [models.aliases]
    "gpt-4o-mini" = "qwen2.5-coder-1.5b"

    [models.auto]
    small = "smollm2-135m"
    large = "qwen2.5-coder-1.5b"

    [models.workspaces.ws_research]
    allowed = ["smollm2-135m", "sql-adapter"]
    region = "eu"

Plain data: `catalogue` and `auto` act on it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal
from penstock.gateway.models.complexity import Complexity, Thresholds

AUTO = "auto"  # the name that leaves the choice to the gateway


class AutoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models behind the name `auto`. A size without a model is served by the next larger one that has one."""

    small: str | None = None
    medium: str | None = None
    large: str | None = None
    medium_from: Annotated[float, Meta(ge=0, le=1)] = 0.3
    large_from: Annotated[float, Meta(ge=0, le=1)] = 0.6
    # An answer whose tokens had a lower mean log-probability is asked for again, of the next larger model.
    min_mean_logprob: Annotated[float, Meta(le=0)] = -1.0
    max_escalations: Annotated[int, Meta(ge=0, le=2)] = 1

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(medium_from=self.medium_from, large_from=self.large_from)

    @property
    def models(self) -> tuple[str, ...]:
        """All that are named, smallest first."""
        return self.models_from(Complexity.SMALL)

    def models_from(self, complexity: Complexity) -> tuple[str, ...]:
        """The models that are large enough for a prompt, smallest first; the largest model when none is."""
        sizes = (self.small, self.medium, self.large)
        first = tuple(Complexity).index(complexity)
        found = [name for name in sizes[first:] if name is not None]
        found = found or [name for name in sizes if name is not None][-1:]
        return tuple(dict.fromkeys(found))

    def check(self) -> None:
        if self.small is None and self.medium is None and self.large is None:
            raise ConfigError("models.auto names no model.", hint="Set small, medium or large.")
        if self.medium_from > self.large_from:
            raise ConfigError("models.auto.medium_from is above large_from.")
        if AUTO in (self.small, self.medium, self.large):
            raise ConfigError(f"models.auto names {AUTO!r}, which is itself.")


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which models one key or workspace may use, and in which region."""

    allowed: tuple[str, ...] | None = None  # names of models, adapters or aliases; None allows all
    region: str | None = None  # where its requests should be served, unless they say so themselves

    def allows(self, names: tuple[str, ...]) -> bool:
        return self.allowed is None or any(name in self.allowed for name in names)


_NO_RULES = ModelAccess()


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    aliases: dict[str, str] = {}
    auto: AutoSettings | None = None
    workspaces: dict[str, ModelAccess] = {}
    keys: dict[str, ModelAccess] = {}

    def allows(self, principal: Principal, names: tuple[str, ...]) -> bool:
        """Whether a caller may use a model that goes by these names. The key itself, its table here and its
        workspace's must all allow it."""
        return any(map(principal.may_use, names)) and all(
            access.allows(names) for access in self._access(principal)
        )

    def region_of(self, principal: Principal) -> str:
        """The region that the key or the workspace prefers; empty for none."""
        return next((access.region for access in self._access(principal) if access.region), "")

    def check(self) -> None:
        if self.auto is not None:
            self.auto.check()
        for alias, name in self.aliases.items():
            if name in self.aliases:
                raise ConfigError(f"models.aliases.{alias} points to {name!r}, which is an alias itself.")
            if alias == AUTO and self.auto is not None:
                raise ConfigError(f"models.aliases has {AUTO!r}, and models.auto is there too.")

    def _access(self, principal: Principal) -> tuple[ModelAccess, ModelAccess]:
        return (
            self.keys.get(principal.key_id, _NO_RULES),
            self.workspaces.get(principal.workspace_id, _NO_RULES),
        )
