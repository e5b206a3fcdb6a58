"""Grammars on the default model, whose tokens are whole words and pieces of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.cli.console import fetch_model
from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.request import FinishReason, Grammar, SamplingParams
from penstock.engine.offline import OfflineEngine

from .test_grammar import schemas

pytestmark = pytest.mark.e2e

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["en", "fr", "de"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    config = EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(num_kv_blocks=512))
    engine = OfflineEngine(config, fetch_model("smollm2-135m"))
    yield engine
    engine.close()


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def sampling(grammar: Grammar | None, seed: int = 0, temperature: float = 0.8) -> SamplingParams:
    return SamplingParams(max_tokens=80, temperature=temperature, seed=seed, grammar=grammar)


def test_every_kind_of_grammar_beside_free_answers(engine: OfflineEngine) -> None:
    questions = [
        chat("Tell me about a person."),
        chat("Is water wet?"),
        chat("Give me a date."),
        chat("Hello!"),
    ]
    held = [
        Grammar("json_schema", json.dumps(PERSON)),
        Grammar("choice", '["yes", "no", "perhaps"]'),
        Grammar("regex", r"(19|20)\d\d-[01]\d-[0-3]\d"),
    ]
    free = sampling(None)
    (alone,) = engine.generate([questions[3]], free)
    person, wet, date, hello = engine.generate(questions, [*map(sampling, held), free])
    assert (person.finish_reason, wet.finish_reason, date.finish_reason) == (FinishReason.STOP,) * 3
    jsonschema.validate(json.loads(person.text), PERSON)
    assert wet.text in ("yes", "no", "perhaps")
    assert re.fullmatch(r"(19|20)\d\d-[01]\d-[0-3]\d", date.text)
    assert hello.token_ids == alone.token_ids


@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@given(wanted=st.lists(schemas(), min_size=6, max_size=6))
def test_random_schemas(engine: OfflineEngine, wanted: list[dict[str, Any]]) -> None:
    held = [sampling(Grammar("json_schema", json.dumps(schema)), seed) for seed, schema in enumerate(wanted)]
    answers = engine.generate([chat("JSON, please.")] * len(held), held)
    for schema, answer in zip(wanted, answers, strict=True):
        assert answer.error is None
        if answer.finish_reason is FinishReason.STOP:
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


def test_what_the_tokenizer_cannot_write_ends_the_answer_with_a_sentence(engine: OfflineEngine) -> None:
    unwritable = sampling(Grammar("json_schema", json.dumps({"const": "a\U0007c6ff"})))
    writable = sampling(Grammar("json_schema", json.dumps({"const": "a\U0001f600"})))
    lost, found = engine.generate([chat("JSON, please.")] * 2, [unwritable, writable])
    assert lost.error is not None
    assert "cannot follow its grammar" in lost.error
    assert json.loads(found.text) == "a\U0001f600"
