"""/v1/moderations: what the caller's safety policy finds in texts. A model is asked only where a rule of the policy
asks one.

The categories are the rules of the policy. OpenAI's own categories are there as well, because its clients require
them: not flagged, and applied to no type of input, which says that nothing looked for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.api.http.answers import json_response
from penstock.api.http.context import principal_of, request_id_of
from penstock.api.http.parsing import BodyDecoder
from penstock.core.errors import ContentRefused, InvalidRequest, NotFound
from penstock.gateway.gateway import Gateway
from penstock.gateway.guards.policy import Case, Direction, PolicyRule
from penstock.gateway.guards.settings import Action
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt

MAX_INPUTS = 1024
OPENAI_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent"),
    *("self-harm", "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)


class ModeratedPart(msgspec.Struct):
    type: str
    text: str | None = None


class CreateModeration(msgspec.Struct):
    input: str | list[str | ModeratedPart]
    model: str | None = None  # accepted; the caller's policy decides

    def texts(self) -> list[str]:
        """One text for each result: the parts of one message are one text."""
        if isinstance(self.input, str):
            return [self.input]
        if not 0 < len(self.input) <= MAX_INPUTS:
            raise InvalidRequest(f"input must have 1 to {MAX_INPUTS} entries.", param="input")
        parts = [part for part in self.input if isinstance(part, ModeratedPart)]
        if any(part.type != "text" or part.text is None for part in parts):
            raise InvalidRequest("Only text can be moderated.", param="input")
        texts = [part for part in self.input if isinstance(part, str)]
        return [*texts, *(["\n".join(part.text or "" for part in parts)] if parts else [])]


class Moderation(msgspec.Struct):
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class ModerationList(msgspec.Struct):
    id: str
    model: str
    results: list[Moderation]


@dataclass(frozen=True, slots=True)
class ModerationCase(Case):
    """A case that remembers which rules found something."""

    found_by: set[str] = field(default_factory=set)

    def found(self, rule: PolicyRule, direction: Direction, label: str, reason: str, text: str = "") -> None:
        if rule.action is not Action.ALLOW:
            self.found_by.add(rule.name)


class ModerationEndpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder(CreateModeration)

    def routes(self) -> list[Route]:
        return [Route("/v1/moderations", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        wire = await self._decoder.read(request)
        texts = wire.texts()
        principal = principal_of(request)
        guards = self._gateway.guards
        policy = guards.policy_for(principal)
        if policy is None:
            raise NotFound(
                "There is no safety policy by which texts could be moderated.",
                hint="The operator can give one to a workspace in the settings file.",
            )
        results = []
        async with self._gateway.accounts.errand(principal, policy.name, "moderations"):
            for text in texts:
                case = ModerationCase(
                    policy, guards.metrics, request_id_of(request), principal, principal.best_tier
                )
                asked = GenerationRequest(prompts=(TextPrompt(text),), sampling=SamplingOptions())
                try:
                    await guards.check(case, asked, _no_tokens)
                    is_refused = False
                except ContentRefused:
                    is_refused = True
                rules = {rule.name: rule.name in case.found_by for rule in policy.input.rules}
                found = dict.fromkeys(OPENAI_CATEGORIES, False) | rules
                scores = {name: float(is_found) for name, is_found in found.items()}
                types = {name: ["text"] if name in rules else [] for name in found}
                results.append(Moderation(is_refused or any(found.values()), found, scores, types))
        body = ModerationList(f"modr-{request_id_of(request)}", policy.name, results)
        return json_response(body)


async def _no_tokens(token_ids: object) -> str:
    raise InvalidRequest("Only text can be moderated.", param="input")
