"""Builds the drafters of an engine, and lets several of them draft together. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.core.engine_config import Speculate
from penstock.core.errors import ConfigError
from penstock.core.plan import Draft
from penstock.core.request import Request
from penstock.engine.drafters.interface import Drafter
from penstock.engine.drafters.lookup import LookupDrafter

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import GrammarMasks


logger = logging.getLogger(__name__)

FEW_REQUESTS = 8


def build_drafter(
    speculate: Speculate, forced: Sequence[Drafter] = (), of_model: Drafter | None = None
) -> Drafter | None:
    """Return the drafter that the setting asks for; None to draft nothing. `forced` draft what must follow, and go
    first. `of_model` is a loaded draft model or head: its drafts take time, so lookup goes before it."""
    if speculate.kind == "off":
        return None
    if speculate.kind == "lookup":
        return Drafters([LookupDrafter()])
    if speculate.kind == "auto":
        return Drafters([*forced, LookupDrafter()], of_model)
    if of_model is None:
        raise ConfigError(
            f"This model writes no text that --speculate {speculate.kind}={speculate.argument} could draft.",
            hint="Leave --speculate out.",
        )
    return Drafters([*forced, of_model])


class Drafters:
    """Asks drafters in their order, and takes the first draft for each request. A drafter that raises an error is
    switched off, with a warning in the log; the others continue."""

    def __init__(self, drafters: Sequence[Drafter], for_few: Drafter | None = None) -> None:
        """`for_few` is asked last, and only where few requests want drafts: with many, its work costs more than the
        drafts that lookup does not find bring."""
        self._drafters = [*drafters, *(() if for_few is None else (for_few,))]
        self._for_few = for_few

    def add(self, request: Request) -> None:
        for drafter in tuple(self._drafters):
            self._call(drafter, lambda each: each.add(request))

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        for drafter in tuple(self._drafters):
            self._call(drafter, lambda each: each.append(request_id, token_ids, num_verified))

    def remove(self, request_id: str) -> None:
        for drafter in tuple(self._drafters):
            self._call(drafter, lambda each: each.remove(request_id))

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for drafter in tuple(self._drafters):
            if drafter is self._for_few and len(wanted) > FEW_REQUESTS:
                continue
            found: dict[str, Draft] = {}
            missing = (
                {each: most for each, most in wanted.items() if each not in drafts} if drafts else wanted
            )
            if not missing:
                break
            self._call(drafter, lambda each: found.update(each.propose(missing)))  # noqa: B023
            drafts = found | drafts
        return drafts

    def _call(self, drafter: Drafter, action: Callable[[Drafter], None]) -> None:
        try:
            action(drafter)
        except Exception:
            self._drafters.remove(drafter)
            logger.warning(
                "%s has failed and drafts no more; answers go on", type(drafter).__name__, exc_info=True
            )


NAME = "grammar"


class GrammarDrafter:
    """Drafts the tokens that a request's grammar forces, such as keys and punctuation of a JSON schema. `masks`
    follows the requests itself.

    The mask threads find forced tokens. The drafter waits for them for half a millisecond at most: tokens that they
    find later are drafted a step later, or not at all. The model still samples at every position, because most forced
    text can be cut into tokens in several ways."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        masks.finds_forced = True

    def add(self, request: Request) -> None: ...

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        forced = self._masks.forced(wanted)
        return {
            request_id: Draft(token_ids[: wanted[request_id]], NAME)
            for request_id, token_ids in forced.items()
        }
