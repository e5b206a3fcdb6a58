"""The first requests of a replica's life, made by us, so that no client pays for what happens once."""

from __future__ import annotations

import asyncio

from penstock.cluster.client import EngineClient
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.messages import EngineReady
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason, Request, SamplingParams

_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 2  # one by a prompt's computation, one by a decode step


async def warm_up(client: EngineClient, ready: EngineReady) -> float:
    """Returns the seconds that each token of a prompt took, once everything was warm."""
    token_s = 0.0
    for number in range(2):
        token_s = await _answer_once(client, ready, f"warm-up-{number}")
    return token_s


async def _answer_once(client: EngineClient, ready: EngineReady, request_id: str) -> float:
    card = ready.model
    num_tokens = max(1, min(_PROMPT_TOKENS, card.max_model_len - _OUTPUT_TOKENS))
    token_id = card.bos_token_id or 0
    request = Request(
        id=request_id,
        prompt_token_ids=(token_id,) * num_tokens,
        sampling=SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
        cache_salt=request_id,  # what it leaves in the prefix cache matches nobody
        pooling=card.pooling if card.is_encoder else None,
    )
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    started_s = loop.time()
    first_token_s = 0.0

    def on_event(event: TokenEvent) -> None:
        nonlocal first_token_s
        first_token_s = first_token_s or loop.time() - started_s
        if event.finish_reason is FinishReason.ERROR:
            on_error(EngineUnavailable(f"The engine failed its first request: {event.error}"))
        elif event.finish_reason is not None and not ended.done():
            ended.set_result(None)

    def on_error(error: PenstockError) -> None:
        if not ended.done():
            ended.set_exception(error)

    client.add(request, timeout_s=None, on_event=on_event, on_error=on_error)
    await ended
    return first_token_s / num_tokens
