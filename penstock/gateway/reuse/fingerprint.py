"""When two requests are the same: the same prompts, sampling and number of answers, for the same model.

Who asks, how urgently, and under which request id does not matter here; isolation between workspaces is added by
whoever keeps answers. Order matters everywhere, also of the keys of a tool's schema, because a model sees it.
"""

from __future__ import annotations

import hashlib

import msgspec

from penstock.core.messages import ModelCard
from penstock.gateway.prompts import GenerationRequest

_encode = msgspec.msgpack.Encoder().encode


def request_fingerprint(request: GenerationRequest, model_fingerprint: bytes) -> bytes:
    """32 bytes."""
    content = (
        [(type(prompt).__name__, prompt) for prompt in request.prompts],
        request.sampling,
        request.n,
        request.default_max_tokens,
    )
    return hashlib.blake2b(model_fingerprint + _encode(content), digest_size=32).digest()


def model_fingerprint(card: ModelCard) -> bytes:
    """Changes with the weights, the tokenizer and the template: another model under the same name gives other
    answers."""
    return hashlib.blake2b(_encode(card), digest_size=32).digest()
