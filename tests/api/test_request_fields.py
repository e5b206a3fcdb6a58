"""Fields that users of other servers send: each reaches the engine, or changes what the answer shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from penstock.core.plan import TokenEvent, TokenLogprobs
from penstock.core.request import Dry, FinishReason, Request, Tier
from tests.api.conftest import direct_client
from tests.gateway.fake_engine import (
    CHAT_TEMPLATE,
    EOS_ID,
    FakeEngine,
    byte_tokenizer,
    engine_ready,
    model_card,
    script_text,
)

USER = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"model": "bytes", "messages": USER, "max_tokens": 50}),
}
FIELDS: dict[str, Any] = {
    "seed": 7,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "top_n_sigma": 1.5,
    "repeat_last_n": 40,
    "min_tokens": 3,
    "ignore_eos": True,
}


async def ask(engine: FakeEngine, dialect: str, **fields: Any) -> dict[str, Any]:
    path, body = DIALECTS[dialect]
    async with direct_client(engine) as client:
        answer = await client.post(path, json=body | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_carries_the_same_extensions(dialect: str) -> None:
    engine = FakeEngine(script_text("fine"))
    lists = {
        "stop_token_ids": [9],
        "allowed_token_ids": [1, 2],
        "logit_bias": {"5": 1.5},
        "bad_words": ["no"],
    }
    await ask(engine, dialect, **FIELDS, **lists, priority=-1, cache_salt="mine")
    (request,) = engine.added
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in FIELDS} == FIELDS
    assert (sampling.stop_token_ids, sampling.allowed_token_ids, sampling.logit_bias) == (
        (9,),
        (1, 2),
        {5: 1.5},
    )
    assert sampling.bad_words == (tuple(b"no"), tuple(b" no"))
    assert (request.tier, request.cache_salt) == (Tier.PRIORITY, "mine")
    await ask(engine, dialect, guided_regex="fi.*", priority=4)
    grammar = engine.added[1].sampling.grammar
    assert (grammar and grammar.kind, engine.added[1].tier) == ("regex", Tier.BATCH)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_carries_the_penalty_of_repetitions(dialect: str) -> None:
    engine = FakeEngine(script_text("fine"))
    await ask(engine, dialect, dry_multiplier=0.8)
    own = {"dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 50}
    await ask(engine, dialect, dry_multiplier=0.8, dry_sequence_breakers=["ab", "|user"], **own)
    await ask(engine, dialect, dry_multiplier=0.8, dry_sequence_breakers='":", "*"')
    await ask(engine, dialect, dry_multiplier=0.8, dry_sequence_breakers=[])
    await ask(engine, dialect, dry_multiplier=0.8, dry_penalty_last_n=0)
    await ask(engine, dialect, dry_multiplier=0)
    dry = [request.sampling.dry for request in engine.added]
    assert dry[0] == Dry(0.8, breakers=bits(*b'\n:"*'))
    # The last token of a text of two tokens, and the token that contains the other text.
    assert dry[1] == Dry(0.8, 2, 3, 50, bits(ord("b"), ord("r"), 258))
    assert dry[2] == Dry(0.8, breakers=bits(*b":*"))
    assert dry[3] == Dry(0.8, breakers=bits())
    assert dry[4:] == [None, None]


def bits(*token_ids: int) -> bytes:
    number = sum(1 << token_id for token_id in token_ids)
    return number.to_bytes(-(-engine_ready().model.vocab_size // 8), "little")


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_special_tokens_and_stops_can_be_shown(dialect: str) -> None:
    def script(request: Request) -> list[TokenEvent]:
        ids = (*b"a<", 258, *b">b.c", EOS_ID)
        return [
            TokenEvent(request.id, ids, finish_reason=FinishReason.STOP, num_cached_tokens=0, queue_s=0.0)
        ]

    engine = FakeEngine(script)
    assert text_of(await ask(engine, dialect)) == "a<>b.c"
    assert text_of(await ask(engine, dialect, skip_special_tokens=False)) == "a<<|user|>>b.c"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of(await ask(engine, dialect, **shown)) == "a<<|user|>>b.c<|end|>"
    assert text_of(await ask(engine, dialect, stop=".")) == "a<>b"
    assert text_of(await ask(engine, dialect, stop=["b."], include_stop_str_in_output=True)) == "a<>b."


async def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    engine = FakeEngine(script_text("a.b.c.d"))
    assert text_of(await ask(engine, "completions", stop=".")) == "a"
    assert text_of(await ask(engine, "completions", stop=".", min_tokens=2)) == "a.b"
    assert text_of(await ask(engine, "completions", stop=".", min_tokens=3)) == "a.b"
    assert text_of(await ask(engine, "completions", stop="b.", min_tokens=3)) == "a.b.c.d"


async def test_responses_stop_at_texts() -> None:
    engine = FakeEngine(script_text("a.b"))
    answer = await ask(engine, "responses", stop=".")
    assert answer["output"][0]["content"][0]["text"] == "a"
    assert engine.added[0].sampling.stop == (".",)


@pytest.mark.parametrize("dialect", ["chat", "completions"])
async def test_token_ids_come_with_the_answer(dialect: str) -> None:
    engine = FakeEngine(script_text("hey"))
    answer = await ask(engine, dialect, return_token_ids=True)
    prompt = list(engine.added[0].prompt_token_ids)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*b"hey", EOS_ID]
    assert (answer if dialect == "chat" else choice)["prompt_token_ids"] == prompt
    assert "token_ids" not in json.dumps(await ask(engine, dialect))
    path, body = DIALECTS[dialect]
    async with direct_client(engine) as client:
        stream = await client.post(path, json=body | {"stream": True, "return_token_ids": True})
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token_id for each in choices for token_id in each.get("token_ids", ())] == [*b"hey", EOS_ID]
    assert [each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each] == [prompt]


async def test_the_best_of_several_answers() -> None:
    def script(request: Request) -> list[TokenEvent]:
        number = int(request.id.rpartition("-")[2])
        scores = tuple(TokenLogprobs(-float((number * 2) % 5)) for _ in range(2))
        ids = (ord("a") + number, EOS_ID)
        return [TokenEvent(request.id, ids, scores, FinishReason.STOP, num_cached_tokens=0, queue_s=0.0)]

    engine = FakeEngine(script)
    answer = await ask(engine, "completions", prompt=["x", "y"], n=2, best_of=4, seed=1)
    # Of the scores 0, -2, -4, -1 and then -3, 0, -2, -4.
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "a"),
        (1, "d"),
        (2, "f"),
        (3, "g"),
    ]
    assert all(each["logprobs"] is None for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 16
    assert [each.sampling.seed for each in engine.added[:4]] == [1, 2, 3, 4]


async def test_beams_of_a_chat() -> None:
    def script(request: Request) -> list[TokenEvent]:
        top = TokenLogprobs(-1.0, tuple(range(97, 103)), tuple(-float(rank) for rank in range(6)))
        reason = FinishReason.LENGTH
        return [TokenEvent(request.id, (97,), (top,), reason, num_cached_tokens=0, queue_s=0.0)]

    options = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True, "temperature": 0}
    engine = FakeEngine(script)
    answer = await ask(engine, "chat", n=2, best_of=3, max_tokens=2, **options)
    assert [each["message"]["content"] for each in answer["choices"]] == ["aa", "ab"]
    assert answer["usage"]["completion_tokens"] == 6
    assert [len(request.output_token_ids) for request in engine.added] == [0, 1, 1, 1]
    # A beam more than is shown is searched for, and one answer is the default.
    answer = await ask(engine, "chat", best_of=2, max_tokens=1, use_beam_search=True)
    assert [each["message"]["content"] for each in answer["choices"]] == ["a"]


async def test_prompts_are_cut_to_their_last_tokens() -> None:
    engine = FakeEngine(script_text("fine"))
    await ask(engine, "completions", prompt="abcdef", truncate_prompt_tokens=3)
    await ask(engine, "completions", prompt=list(b"abcdef"), truncate_prompt_tokens=9)
    await ask(engine, "completions", prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=6)
    await ask(engine, "chat", messages=[{"role": "user", "content": "x" * 90_000}], truncate_prompt_tokens=20)
    lengths = [len(request.prompt_token_ids) for request in engine.added]
    assert lengths == [3, 6, 250, 20]
    assert bytes(engine.added[0].prompt_token_ids) == b"def"


async def test_a_gap_is_filled_in_with_the_tokens_of_the_model() -> None:
    tokenizer = byte_tokenizer()
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    engine = FakeEngine(script_text("fine"), engine_ready(model_card(tokenizer=tokenizer)))
    before, behind, middle = map(tokenizer.token_to_id, names)
    await ask(engine, "completions", prompt="ab", suffix="cd")
    assert engine.added[0].prompt_token_ids == (before, *b"ab", behind, *b"cd", middle)
    async with direct_client(engine) as client:
        body = {"model": "bytes", "prompt": "ab", "suffix": "cd", "stream": False}
        assert (await client.post("/api/generate", json=body)).status_code == 200
    assert engine.added[1].prompt_token_ids == engine.added[0].prompt_token_ids


async def test_fields_of_chats_reach_the_template() -> None:
    template = (
        "{{ documents[0].title if documents else '-' }}|{{ enable_thinking | default('-') }}|"
        "{{ reasoning_effort | default('-') }}|" + CHAT_TEMPLATE
    )
    card = model_card(chat_template=template, named_templates={"rag": "rag"})
    engine = FakeEngine(script_text("fine"), engine_ready(card))
    document = {"title": "T", "text": "x"}
    for fields in (
        {"documents": [document], "enable_thinking": False},
        {"thinking": {"type": "enabled"}, "add_generation_prompt": False},
        {"reasoning": {"effort": "low"}, "messages": [*USER, {"role": "assistant", "content": "Yes, "}],
         "continue_final_message": True},
        {"chat_template": "rag"},
    ):  # fmt: skip
        await ask(engine, "chat", **fields)
    decode = byte_tokenizer().decode
    texts = [decode(list(each.prompt_token_ids), skip_special_tokens=False) for each in engine.added]
    assert texts == [
        "T|False|-|<|user|>hi<|end|><|assistant|>",
        "-|True|-|<|user|>hi<|end|>",
        "-|True|low|<|user|>hi<|end|><|assistant|>Yes, ",
        "rag",
    ]
