"""/v1/moderations: what a classifier finds in texts, or the caller's safety policy where no classifier is served.

The categories are the labels of the classifier, or the rules of the policy. A label whose name means nothing harmful
is no reason to flag a text. OpenAI's own categories are there as well, because its clients require them: not flagged,
and applied to no type of input, which says that nothing looked for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.api.http.answers import WholeAnswer, json_response
from penstock.api.http.context import principal_of, request_id_of
from penstock.api.http.routes import Operation
from penstock.api.openai.embeddings import run_job, vector_request
from penstock.core.errors import ContentRefused, InvalidRequest, NotFound
from penstock.core.identity import Principal
from penstock.core.messages import ModelCard
from penstock.gateway.embeddings.run import numbers
from penstock.gateway.embeddings.scores import probabilities
from penstock.gateway.embeddings.service import Embeddings
from penstock.gateway.gateway import Gateway
from penstock.gateway.guards.policy import Direction, PolicyRule, PolicyRun
from penstock.gateway.guards.settings import Action
from penstock.gateway.models.served_model import ServedModel
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt

MAX_INPUTS = 1024
OPENAI_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent"),
    *("self-harm", "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)

_FLAGGED_FROM = 0.5
_HARMS = (
    "toxic|hate|hateful|harmful|offensive|spam|injection|jailbreak|unsafe|abusive|violent|nsfw|threat|sexual"
)
_HARMLESS = re.compile(
    rf"(safe|ok|okay|neutral|benign|normal|clean|none|harmless|legit|legitimate|acceptable|ham"
    rf"|sfw|neither|appropriate|unharmful|(non|not|no)[-_ ]?({_HARMS})([-_ ]speech)?)$",
    re.IGNORECASE,
)


class ModeratedPart(msgspec.Struct):
    type: str
    text: str | None = None


class CreateModeration(msgspec.Struct):
    input: str | list[str | ModeratedPart]
    model: str | None = None  # a classifier; OpenAI's names stand for what is served

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
class ModerationCase(PolicyRun):
    """A case that remembers which rules found something."""

    found_by: set[str] = field(default_factory=set)

    def found(self, rule: PolicyRule, direction: Direction, label: str, reason: str, text: str = "") -> None:
        if rule.action is not Action.ALLOW:
            self.found_by.add(rule.name)


class ModerationEndpoints:
    def __init__(self, gateway: Gateway, embeddings: Embeddings) -> None:
        self._gateway = gateway
        self._embeddings = embeddings

    def routes(self) -> list[Operation]:
        return [Operation("POST /v1/moderations", self.create, ModerationList, reads=CreateModeration)]

    async def create(self, request: Request, wire: CreateModeration) -> ASGIApp:
        texts = wire.texts()
        card = self._classifier(principal_of(request), wire.model)
        if card is not None:
            return await self._classify(request, texts, card)
        return await self._guard(request, texts)

    def _classifier(self, principal: Principal, name: str | None) -> ModelCard | None:
        """Return the classifier that the request names; or the only one that the caller may use, for a request that
        names none."""
        classifiers = {
            entry.name: entry.model.card
            for entry in self._gateway.catalogue.listed(principal)
            if isinstance(entry.model, ServedModel) and len(entry.model.card.pooler.labels) > 1
        }
        if name is None or (name not in classifiers and _is_openai(name)):
            served = {card.name: card for card in classifiers.values()}
            return next(iter(served.values())) if len(served) == 1 else None
        return classifiers.get(name)

    async def _classify(self, request: Request, texts: list[str], card: ModelCard) -> ASGIApp:
        asked = vector_request(request, card.name, inputs=tuple(texts), endpoint="moderations")
        answer = await run_job(self._embeddings.open(asked), request)
        harmful = [not is_harmless(label, index, card) for index, label in enumerate(card.pooler.labels)]
        results = []
        for vector in answer.vectors:
            scores = probabilities(card.pooler, numbers(vector))
            found = {
                label: is_harm and score >= _FLAGGED_FROM
                for label, is_harm, score in zip(card.pooler.labels, harmful, scores, strict=True)
            }
            total = sum(score for score, is_harm in zip(scores, harmful, strict=True) if is_harm)
            is_flagged = any(found.values()) or (not card.pooler.is_multi_label and total >= _FLAGGED_FROM)
            by_label = dict(zip(card.pooler.labels, scores, strict=True))
            results.append(_moderation(found, by_label, is_flagged))
        body = ModerationList(f"modr-{request_id_of(request)}", card.name, results)
        return WholeAnswer(msgspec.json.encode(body), answer.rate_limits)

    async def _guard(self, request: Request, texts: list[str]) -> Response:
        principal = principal_of(request)
        guards = self._gateway.guards
        policy = guards.policy_for(principal)
        if policy is None:
            raise NotFound(
                "There is no safety policy by which texts could be moderated, and no classifier.",
                hint="The operator can give a policy to a workspace in the settings file, or serve a classifier.",
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
                scores = {name: float(is_found) for name, is_found in rules.items()}
                results.append(_moderation(rules, scores, is_refused or any(rules.values())))
        body = ModerationList(f"modr-{request_id_of(request)}", policy.name, results)
        return json_response(body)


def _moderation(found: dict[str, bool], scores: dict[str, float], is_flagged: bool) -> Moderation:
    """Return a result with OpenAI's categories besides those that were looked for."""
    return Moderation(
        flagged=is_flagged,
        categories=dict.fromkeys(OPENAI_CATEGORIES, False) | found,
        category_scores=dict.fromkeys(OPENAI_CATEGORIES, 0.0) | scores,
        category_applied_input_types={
            name: ["text"] if name in found else [] for name in (*OPENAI_CATEGORIES, *found)
        },
    )


def is_harmless(label: str, index: int, card: ModelCard) -> bool:
    """Return whether a label means that nothing is wrong. Of two labels without a name, the first does."""
    if card.pooler.is_multi_label and label.startswith("LABEL_"):
        return False
    return bool(_HARMLESS.match(label)) or (label == "LABEL_0" and len(card.pooler.labels) == 2)


def _is_openai(name: str) -> bool:
    return name.startswith(("omni-moderation", "text-moderation"))


async def _no_tokens(token_ids: object) -> str:
    raise InvalidRequest("Only text can be moderated.", param="input")
