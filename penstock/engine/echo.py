"""The echo engine has no model and answers with the prompt, over and over. Knows no torch.

`penstock serve echo` runs the real scheduler, wire and gateway around it, so that these can be measured and tested
alone. Tokens are bytes.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from penstock.core.clock import Clock
from penstock.core.messages import ModelCard
from penstock.core.plan import Chunk, SampledToken, StepPlan, StepResult
from penstock.core.request import Request

if TYPE_CHECKING:
    from penstock.engine.grammar_masks import CompiledGrammar

ECHO_MODEL = "echo"
END_TOKEN = "<|end|>"
NUM_BYTES = 256
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class EchoExecutor:
    """Samples the prompt's tokens in order, starting over at its end. A step takes no time of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._submitted: deque[StepResult] = deque()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self._prompts[request.id] = request.prompt_token_ids

    def append(self, request_id: str, token_ids: tuple[int, ...]) -> None:
        """Do nothing: the next token follows from the position alone."""

    def remove(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def submit(self, plan: StepPlan) -> tuple[Chunk, ...]:
        started_s = self._clock.now()
        sampled = tuple(self._sample(chunk) for chunk in plan.chunks if chunk.samples)
        self._submitted.append(StepResult(plan.step_id, sampled, self._clock.now() - started_s))
        return ()

    def collect(self) -> StepResult:
        return self._submitted.popleft()

    def _sample(self, chunk: Chunk) -> SampledToken:
        position = chunk.start + chunk.num_tokens - len(chunk.drafts)
        accepted = 0
        while chunk.drafts[accepted:] and chunk.drafts[accepted] == self._token(
            chunk.request_id, position + accepted
        ):
            accepted += 1
        token_id = self._token(chunk.request_id, position + accepted)
        return SampledToken(chunk.request_id, token_id, accepted=chunk.drafts[:accepted])

    def _token(self, request_id: str, position: int) -> int:
        prompt = self._prompts.get(request_id, (0,))
        return prompt[position % len(prompt)]


def echo_card(name: str, max_model_len: int) -> ModelCard:
    return ModelCard(
        name=name,
        architecture="echo",
        vocab_size=NUM_BYTES + 1,
        max_model_len=max_model_len,
        tokenizer_json=byte_tokenizer_json(),
        chat_template=_CHAT_TEMPLATE,
        special_tokens={"eos_token": END_TOKEN},
        bos_token_id=None,
        add_bos_token=False,
        eos_token_ids=(NUM_BYTES,),
        weight_bytes=0,
        num_parameters=0,
        dtype="none",
        quantization=None,
    )


def byte_tokenizer_json() -> bytes:
    """Return a `tokenizers` file in which token i is byte i, and one special token ends an answer."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": NUM_BYTES,
                    "content": END_TOKEN,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    ).encode()


def _byte_characters() -> dict[int, str]:
    """Return the printable characters that byte-level tokenizers use for bytes, by byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    stand_ins = dict(zip(printable, map(chr, printable), strict=True))
    others = (byte for byte in range(NUM_BYTES) if byte not in stand_ins)
    stand_ins.update({byte: chr(NUM_BYTES + offset) for offset, byte in enumerate(others)})
    return stand_ins
