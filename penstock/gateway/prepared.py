"""One request before its dispatch: the results of the steps of `Gateway.ask` so far.

`prepare_for_engine` and `prepare_for_server` are the costly step: prompts become engine requests, or calls to an
external server. Knows no limits and no guards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.cluster.external.wire import ExternalCall
from penstock.core.clock import Clock
from penstock.core.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from penstock.core.request import Request, SamplingParams, Tier
from penstock.core.shares import Holding
from penstock.gateway.accounts import Admission, Claim
from penstock.gateway.answers.choice import Choice
from penstock.gateway.checks import (
    MAX_BEAM_TOKENS,
    check_num_prompt_logprobs,
    grammar_with_beams,
    max_tokens_lowered,
    resolve_max_tokens,
)
from penstock.gateway.external.models import ExternalModel, calls_for
from penstock.gateway.guards.policy import PolicyRun
from penstock.gateway.models.catalogue import AnsweringModel
from penstock.gateway.models.served_model import PreparedPrompt, ServedModel
from penstock.gateway.prompts import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    PromptScores,
    RequestWarning,
    image_parts,
)
from penstock.gateway.text.caching import PromptCacheSettings
from penstock.gateway.turns import Turns

IMAGES_SKIPPED = RequestWarning(
    "item_skipped", "Input items of the type 'input_image' were skipped.", "input"
)
# Tokens that are reserved for the answer of an external server when the request names no limit.
ASSUMED_MAX_TOKENS = 1024
MAX_WHOLE_TOKENS = 512  # of an answer that an external server is asked for in one piece


class PreparedRequest(msgspec.Struct, eq=False, kw_only=True):
    """Made by `authorize`; the steps after it fill in the rest, in the order of the fields."""

    request: GenerationRequest  # as it will run: guards may change it
    model: AnsweringModel
    id: str
    tier: Tier
    region: str
    spill_over_s: float | None  # the predicted wait at which it leaves the region
    default_max_tokens: int | None
    deadline: float | None  # on the gateway's clock
    is_internal: bool  # asked by the gateway itself, on behalf of a request that was admitted
    refuses_long_outputs: bool = False  # instead of lowering `max_tokens` to what fits
    admission: Admission | None = None
    held: Holding | None = None  # of the bytes of files, until the request ends
    case: PolicyRun | None = None  # what guards report to; None without a policy
    prompts: list[PreparedPrompt] = []
    engine_requests: list[Request] = []  # for a model of our own engines
    choices: list[Choice] = []  # one for each of them
    calls: list[ExternalCall] = []  # for a model of an external server
    warnings: tuple[RequestWarning, ...] = ()  # for the answer

    def claim(self) -> Claim:
        """Return the most tokens that the request may use, as far as they are known by now."""
        input_tokens = output_tokens = 0
        if self.prompts:
            input_tokens = sum([len(prompt.token_ids) for prompt in self.prompts])
            leaders = self.engine_requests[:: self.request.n]
            output_tokens = self.request.num_sequences * sum([each.sampling.max_tokens for each in leaders])
        elif len(self.calls) == 1:
            call = self.calls[0]
            input_tokens, output_tokens = call.estimated_tokens, call.max_tokens or ASSUMED_MAX_TOKENS
        elif self.calls:
            input_tokens += sum([call.estimated_tokens for call in self.calls[:: self.request.n]])
            output_tokens += sum([call.max_tokens or ASSUMED_MAX_TOKENS for call in self.calls])
        return Claim(
            request_id=self.id,
            principal=self.request.principal,
            model=self.model.name,
            endpoint=self.request.endpoint,
            tier=self.tier,
            input_tokens=input_tokens,
            max_output_tokens=output_tokens,
            user=self.request.user,
        )

    def time_left_s(self, clock: Clock) -> float | None:
        """Until the client's own timeout or the server's, whichever ends first; None when there is neither."""
        if self.deadline is None:
            return None
        left_s = self.deadline - clock.now()
        if left_s <= 0:
            raise DeadlineExceeded("The request's deadline passed before an engine could begin with it.")
        return left_s


async def prepare_for_engine(
    work: PreparedRequest, model: ServedModel, prompt_cache: PromptCacheSettings, turns: Turns
) -> None:
    """Render, tokenize, and check the grammar. One engine request per answer: the n answers of a prompt follow each
    other, with consecutive seeds."""
    request = work.request
    pace = turns.pace()
    asked = request.sampling.max_tokens
    stated = model.card.sampling_defaults
    options = await model.sampling_options(request.sampling)
    prompts = request.prompts
    if request.drops_oldest_turns:
        prompts = tuple([await _cut_to_fit(prompt, model, asked) for prompt in prompts])
    room = request.truncates_to
    if room is not None:
        most = max(1, model.max_model_len - min(asked or 1, model.max_model_len))
        room = most if room < 0 else min(room, most)
    for prompt in prompts:
        await pace.spend()
        work.prompts.append(await model.prepare(prompt, request.sampling.grammar, truncates_to=room))
    # Without a better reason, requests go where the adapter is likely loaded already.
    affinity_key = request.prompt_cache_key or (model.adapter.digest if model.adapter else "")
    _check_copies(request, work.prompts)
    check_num_prompt_logprobs(request.sampling, [len(prepared.token_ids) for prepared in work.prompts])
    unbound = (model.dialect.unbound_thoughts(prompt) for prompt in prompts)
    relaxed = tuple(each for each in unbound if each is not None)  # what is not enforced
    prediction = await model.prediction_ids(request.prediction) if request.prediction else ()
    for prompt, prepared in zip(prompts, work.prompts, strict=True):
        await pace.spend(request.n)
        max_tokens = resolve_max_tokens(
            asked,
            work.default_max_tokens or stated.max_new_tokens,
            len(prepared.token_ids),
            model.engine,
            prompt_param="messages" if isinstance(prompt, ChatPrompt) else "prompt",
            param=request.max_tokens_param,
            refuses_long_outputs=work.refuses_long_outputs,
        )
        if request.beams is not None:
            max_tokens = min(max_tokens, MAX_BEAM_TOKENS)
        sampling, notes = await model.with_checked_grammar(
            _sampling_params(options, prepared, max_tokens), request.principal.workspace_id
        )
        relaxed += notes
        if request.beams is not None and sampling.grammar is not None:
            raise grammar_with_beams("tools")
        for sibling in range(request.n):
            work.engine_requests.append(
                Request(
                    id=f"{work.id}-{len(work.engine_requests)}",
                    prompt_token_ids=prepared.token_ids,
                    sampling=_for_sibling(sampling, sibling),
                    tenant=request.principal.workspace_id,
                    tier=work.tier,
                    model=model.base_name,
                    adapter=model.adapter,
                    region=work.region,
                    spill_over_s=work.spill_over_s,
                    affinity_key=affinity_key,
                    cache_salt="\0".join(filter(None, (prepared.cache_salt, request.cache_salt))),
                    cache_breakpoints=prepared.breakpoints,
                    images=prepared.images,
                    prediction=prediction,
                    min_cacheable_tokens=prompt_cache.min_tokens if prepared.breakpoints else None,
                )
            )
    asks_for_scores = request.sampling.prompt_logprobs is not None
    scores = [PromptScores(prepared.token_ids) if asks_for_scores else None for prepared in work.prompts]
    for index, each in enumerate(work.engine_requests):
        place = index // request.n
        form = work.prompts[place].form
        choice = Choice(index, each, model.tokenizer, model.card.eos_token_ids, form, request.text)
        choice.prompt_scores = scores[place]
        work.choices.append(choice)
    work.warnings = _warnings(request, min([each.sampling.max_tokens for each in work.engine_requests]))
    if relaxed:
        work.warnings += tuple(dict.fromkeys(relaxed))
    if model.card.vision is None and any(map(image_parts, prompts)):
        work.warnings += (IMAGES_SKIPPED,)


MAX_IMAGE_COPY_BYTES = 256 << 20


def _check_copies(request: GenerationRequest, prompts: Sequence[PreparedPrompt]) -> None:
    """Refuse too many copies of images: every answer is a separate engine request, with its own copy."""
    num_bytes = request.n * sum(len(image.data) for prompt in prompts for image in prompt.images)
    if request.n > 1 and num_bytes > MAX_IMAGE_COPY_BYTES:
        raise InvalidRequest(
            f"{request.n} answers to prompts with images of so many bytes are more than this server takes at once.",
            param="n",
        )


def prepare_for_server(work: PreparedRequest, model: ExternalModel) -> None:
    """An external server renders and tokenizes. Until the server tells what a request used, that is estimated."""
    request = work.request
    work.calls = calls_for(
        work.id,
        request,
        model=model.name,
        max_tokens=request.sampling.max_tokens or work.default_max_tokens,
        context=None if work.refuses_long_outputs else model.max_model_len,
        region=work.region,
        spill_over_s=work.spill_over_s,
        tier=work.tier,
        is_whole=_may_ask_whole(work),
    )
    asked = request.sampling.max_tokens or ASSUMED_MAX_TOKENS
    work.warnings = _warnings(request, min([call.max_tokens or asked for call in work.calls]))


def _may_ask_whole(work: PreparedRequest) -> bool:
    """Return whether a server should be asked for the answer in one piece, which costs both sides much less than a
    stream. A long answer would be silent for too long for what lies between, and at a deadline only a stream leaves a
    part."""
    max_tokens = work.request.sampling.max_tokens or work.default_max_tokens
    is_short = max_tokens is not None and max_tokens <= MAX_WHOLE_TOKENS
    return work.request.is_read_whole and is_short and work.deadline is None


def _warnings(request: GenerationRequest, max_tokens: int) -> tuple[RequestWarning, ...]:
    asked = request.sampling.max_tokens
    if asked is None or max_tokens >= asked:
        return request.warnings
    return *request.warnings, max_tokens_lowered(asked, max_tokens, request.max_tokens_param)


def _sampling_params(options: dict[str, Any], prompt: PreparedPrompt, max_tokens: int) -> SamplingParams:
    changes = {"max_tokens": max_tokens, "min_tokens": min(options.get("min_tokens", 0), max_tokens)}
    if prompt.form is not None and prompt.form.grammar is not None:
        changes["grammar"] = prompt.form.grammar
    return SamplingParams(**{**options, **changes})


def _for_sibling(sampling: SamplingParams, sibling: int) -> SamplingParams:
    """Answers to one prompt have consecutive seeds, which wrap around at 64 bits. The first of them scores the
    prompt."""
    if not sibling or (sampling.seed is None and sampling.prompt_logprobs is None):
        return sampling
    seed = None if sampling.seed is None else (sampling.seed + sibling + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=None)


async def _cut_to_fit(prompt: Prompt, model: ServedModel, max_tokens: int | None) -> Prompt:
    """Return the chat without as many of its oldest turns as the context has no room for. System messages at the
    beginning and the last message stay. Room for the answer is at most half of the context: clients ask for more than
    fits."""
    if not isinstance(prompt, ChatPrompt):
        return prompt
    context = model.card.max_model_len
    room = context - min(max_tokens or 1, model.max_output_tokens, max(1, context // 2))
    low, high = 0, len(_droppable(prompt.messages))
    while low < high:
        middle = (low + high) // 2
        if await _fits(_without_oldest(prompt, middle), model, room):
            high = middle
        else:
            low = middle + 1
    return _without_oldest(prompt, low)


async def _fits(prompt: ChatPrompt, model: ServedModel, room: int) -> bool:
    try:
        return len(await model.token_ids(prompt)) <= room
    except ContextLengthExceeded:  # too many characters to be worth tokenizing
        return False


def _droppable(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    first = next((place for place, message in enumerate(messages) if message.role != "system"), 0)
    return messages[first:-1]


def _without_oldest(prompt: ChatPrompt, count: int) -> ChatPrompt:
    droppable = _droppable(prompt.messages)
    num_kept_first = len(prompt.messages) - len(droppable) - 1
    rest = list(droppable[count:])
    while count and rest and rest[0].role == "tool":
        del rest[0]  # the call that the result answers is gone
    messages = (*prompt.messages[:num_kept_first], *rest, prompt.messages[-1])
    return msgspec.structs.replace(prompt, messages=messages)
