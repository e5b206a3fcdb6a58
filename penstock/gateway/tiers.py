"""Which tier a request gets, beyond what its key may claim. Hot-reloadable, for the day one workspace is too loud."""

from __future__ import annotations

import msgspec

from penstock.core.request import Tier
from penstock.gateway.prompts import GenerationRequest

_URGENCY = {tier: rank for rank, tier in enumerate(Tier)}  # most urgent first


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most urgent tier that is granted, whatever a key may claim: to everybody, or to a workspace by its id."""

    best: Tier = Tier.PRIORITY
    workspaces: dict[str, Tier] = {}

    def best_for(self, workspace_id: str) -> Tier:
        return self.workspaces.get(workspace_id, self.best)

    def capped(self, wish: GenerationRequest) -> GenerationRequest:
        best = self.best_for(wish.principal.workspace_id)
        return wish if _URGENCY[best] <= _URGENCY[wish.tier] else msgspec.structs.replace(wish, tier=best)
