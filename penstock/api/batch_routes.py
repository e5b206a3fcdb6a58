"""Files and batches of both APIs: their routes, and the endpoints that the lines of batches go to."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route

from penstock.api.batches_anthropic import KIND as ANTHROPIC
from penstock.api.batches_anthropic import MESSAGES_PATH, MessageBatchEndpoints, MessageBatches
from penstock.api.batches_openai import KIND as OPENAI
from penstock.api.batches_openai import OpenAIBatchEndpoints, OpenAIBatches
from penstock.api.direct import posted_endpoints
from penstock.api.files_endpoints import FilesEndpoints
from penstock.gateway.batches.service import StoredWork


def stored_work_routes(
    work: StoredWork, inference_routes: Sequence[Route], max_body_bytes: int
) -> list[Route]:
    """Also teaches the runner of batches to answer their lines as `inference_routes` would."""
    endpoints = posted_endpoints(inference_routes)
    openai = OpenAIBatches(endpoints)
    anthropic = MessageBatches(endpoints[MESSAGES_PATH])
    work.runner.teach(OPENAI, openai)
    work.runner.teach(ANTHROPIC, anthropic)
    return [
        *FilesEndpoints(work.files).routes(),
        *OpenAIBatchEndpoints(work, openai, max_body_bytes).routes(),
        *MessageBatchEndpoints(work, anthropic, max_body_bytes).routes(),
    ]
