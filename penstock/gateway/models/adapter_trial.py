"""Generates one token with a new adapter before clients may use it: only an engine can tell whether it fits the
model.

Nobody is charged for it, and the engine that tried it has the adapter loaded already.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from penstock.cluster.replica import EngineClient
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.plan import TokenEvent
from penstock.core.request import Request, SamplingParams
from penstock.gateway.models.adapters import RegisteredAdapter
from penstock.gateway.models.catalogue import Catalogue

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
_TENANT = "\x01adapter-trial"  # no workspace's, so that nobody's cache is touched


class AdapterTrial:
    def __init__(self, engine: EngineClient, catalogue: Catalogue) -> None:
        self._engine = engine
        self._catalogue = catalogue

    async def run(self, entry: RegisteredAdapter) -> None:
        """Raises what is wrong with the adapter, or with the engine."""
        base = self._catalogue.base_of(entry)
        if not base.engine.max_lora_rank:
            raise InvalidRequest(
                f"The model {base.card.name!r} takes no LoRA adapters.", param="base_model_name"
            )
        token_id = base.card.bos_token_id or 0
        request = Request(
            id=f"adapter-{uuid.uuid4().hex}",
            prompt_token_ids=(token_id,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            tenant=_TENANT,
            model=base.base_name,
            adapter=entry.adapter,
        )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_event(event: TokenEvent) -> None:
            if event.error is not None:
                on_error(PenstockError(event.error))
            elif event.finish_reason is not None and not done.done():
                done.set_result(None)

        def on_error(error: PenstockError) -> None:
            if not done.done():
                done.set_exception(error)

        self._engine.add(request, timeout_s=TIMEOUT_S, on_event=on_event, on_error=on_error)
        try:
            await done
        except asyncio.CancelledError:
            self._engine.abort(request.id)
            raise


async def try_given(engine: EngineClient, catalogue: Catalogue) -> None:
    """Try the adapters of the command line before the first client comes. An adapter that does not fit is logged, and
    requests for it are refused."""
    trial = AdapterTrial(engine, catalogue)
    for entry in catalogue.adapters.given:
        try:
            await trial.run(entry)
        except PenstockError as error:
            logger.error("the adapter %s cannot be used: %s", entry.adapter.name, error.message)
