"""A scripted engine with two models behind the real gateway, for the playground in a real browser.

What it answers depends on words in the prompt, so that a test sees Markdown, reasoning, tool calls, token
probabilities and an answer that never ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import random

from tokenizers import AddedToken, Tokenizer

from penstock.core.errors import PenstockError
from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import FinishReason, Request
from tests.api.scripted import TOOL_TEMPLATE
from tests.gateway.fake_engine import EOS_ID, FakeEngine, byte_tokenizer, engine_ready, model_card

SMALL, LARGE = "demo-small", "demo-large"
ENDLESS = "never stop"  # in a prompt: the answer begins, and only its reader ends it
NUM_PLAIN_TOKENS = 263  # of the byte tokenizer; words follow
GAP_S = 0.004  # between two tokens
_PRIMES = """To find the *n*-th prime, test each odd number against the primes **found so far**:

```python
def nth_prime(n: int) -> int:
    \"\"\"The n-th prime number; nth_prime(1) is 2.\"\"\"
    primes = [2]
    candidate = 3
    while len(primes) < n:
        if all(candidate % p for p in primes if p * p <= candidate):
            primes.append(candidate)
        candidate += 2  # even numbers are never prime
    return primes[-1]
```

- `nth_prime(1)` returns 2, `nth_prime(10)` returns 29.
- It takes about n·√n·log n steps, which is fine up to some 100,000.
"""
_TABLE = """| algorithm | average | worst | stable |
|---|--:|--:|:-:|
| quicksort | n log n | n² | no |
| mergesort | n log n | n log n | yes |
| insertion sort | n² | n² | yes |

Use **mergesort** where equal items must keep their order.
"""
_BATCHING = {
    SMALL: "Continuous batching lets new requests join the running batch at every step. No request waits for others.",
    LARGE: (
        "With continuous batching, the scheduler decides anew at **every step** which requests take part:\n\n"
        "1. A finished request leaves at once, and its memory is free.\n"
        "2. A waiting request takes its place in the next step.\n\n"
        "So the GPU stays full, and short answers do not wait for long ones."
    ),
}
_ATTACK = (
    "<img src=x onerror=\"document.title='hacked'\"> <script>document.title='hacked'</script> "
    "[click](javascript:document.title='hacked')"
)


class DemoEngine(FakeEngine):
    def __init__(self) -> None:
        self._tokenizer = _word_tokenizer()
        cards = [
            model_card(name=name, tokenizer=self._tokenizer, chat_template=_TEMPLATE, max_model_len=16384)
            for name in (SMALL, LARGE)
        ]
        readies = [engine_ready(card, max_output_tokens=4096) for card in cards]
        super().__init__(self._answer, readies[0])
        self.more = readies[1:]

    def _answer(self, request: Request) -> list[TokenEvent | PenstockError]:
        text = answer_to(prompt_of_words(self._tokenizer, request), request.model)
        endless = ENDLESS in text
        ids = self._tokenizer.encode(text.replace(ENDLESS, "")).ids[: request.sampling.max_tokens]
        dice = random.Random(7)
        events = [
            TokenEvent(
                request.id,
                (token_id,),
                logprobs=_alternatives(token_id, request.sampling.logprobs, dice),
                num_cached_tokens=16 if at == 0 else None,
                queue_s=0.0 if at == 0 else None,
            )
            for at, token_id in enumerate(ids)
        ]
        if not endless:
            events.append(TokenEvent(request.id, (EOS_ID,), finish_reason=FinishReason.STOP, logprobs=()))
        return list(events)

    def _play(self, request_id: str, news: list[TokenEvent | PenstockError]) -> None:
        if news:
            asyncio.get_running_loop().call_later(GAP_S, self._play_next, request_id, news)


# Tools as in Hermes; a system prompt that asks for it makes the model think.
_TEMPLATE = TOOL_TEMPLATE + "{% if 'Think' in messages[0].content %}<think>\n{% endif %}"


def _word_tokenizer() -> Tokenizer:
    """Bytes, and whole words for what is answered, so that tokens look like a real model's."""
    tokenizer = byte_tokenizer()
    texts = [
        _PRIMES,
        _TABLE,
        *_BATCHING.values(),
        "The sky is blue because air scatters short waves of light most.",
    ]
    found = {word for text in texts for word in text.replace("\n", " ").split(" ") if word.isalpha()}
    words = {word for word in found if word[0].isupper()} | {f" {word}" for word in found}
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in sorted(words)])
    return tokenizer


def prompt_of_words(tokenizer: Tokenizer, request: Request) -> str:
    return str(tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False))


def answer_to(prompt: str, model: str) -> str:
    asked = prompt.rpartition("<|user|>")[2].lower()
    thought = (
        "The user wants a short answer, so one sentence is enough.</think>\n\n"
        if prompt.endswith("<think>\n")
        else ""
    )
    if "<tools>" in prompt and "<|tool|>" not in prompt:
        call = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    if "<|tool|>" in prompt:
        return "It is **21 °C** and sunny in Lisbon."
    for word, text in (
        ("prime", _PRIMES),
        ("table", _TABLE),
        ("batching", _BATCHING.get(model, _BATCHING[SMALL])),
        ("attack", _ATTACK),
        ("json", '{"name": "Lisbon", "year": 1256}'),
        ("endless", f"One moment {ENDLESS}"),
    ):
        if word in asked:
            return thought + text
    return f"{thought}The sky is blue because air scatters short waves of light most."


def _alternatives(token_id: int, count: int | None, dice: random.Random) -> tuple[TokenLogprobs, ...]:
    if not count:
        return ()
    share = dice.choice((0.98, 0.95, 0.9, 0.8, 0.6, 0.35, 0.12, 0.03))
    others = dice.sample(range(NUM_PLAIN_TOKENS, NUM_PLAIN_TOKENS + 60), count - 1)
    rest = [(1 - share) / 2**rank for rank in range(1, count)]
    ids = (token_id, *others)[:count]
    values = tuple(math.log(value) for value in (share, *rest))[:count]
    return (TokenLogprobs(math.log(share), ids, values),)
