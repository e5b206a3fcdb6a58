"""The choice of drafters by `--speculate`, and drafters that fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.core.engine_config import EngineConfig, ModelConfig, Speculate, parse_speculate
from penstock.core.errors import ConfigError
from penstock.core.plan import Draft
from penstock.core.request import Request
from penstock.engine.build import build_engine
from penstock.engine.drafters.combination import Drafters, build_drafter
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.serve.config import resolve

from ..models.test_encoders import write_bert
from .tiny import request, run, tiny_engine, tokens, write_tiny_model


class FixedDrafter:
    """Drafts the same token for some requests, and raises an error when told to."""

    def __init__(self, token_id: int, request_ids: set[str]) -> None:
        self.token_id = token_id
        self.request_ids = request_ids
        self.fails_in: str | None = None
        self.calls: list[str] = []

    def _called(self, verb: str) -> None:
        self.calls.append(verb)
        if self.fails_in == verb:
            raise MemoryError("no room for drafts")

    def add(self, request: Request) -> None:
        self._called("add")

    def append(self, request_id: str, token_ids: tuple[int, ...], num_verified: int = 0) -> None:
        self._called("append")

    def remove(self, request_id: str) -> None:
        self._called("remove")

    def propose(self, wanted: Mapping[str, int]) -> dict[str, Draft]:
        self._called("propose")
        return {each: Draft((self.token_id,), "fixed") for each in wanted if each in self.request_ids}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Speculate("auto")),
        ("off", Speculate("off")),
        ("lookup", Speculate("lookup")),
        ("draft=smollm2-135m", Speculate("draft", "smollm2-135m")),
        ("heads=/models/a=b", Speculate("heads", "/models/a=b")),
    ],
    ids=["auto", "off", "lookup", "draft", "heads"],
)
def test_the_setting_is_read(text: str, expected: Speculate) -> None:
    assert parse_speculate(text) == expected


@pytest.mark.parametrize("text", ["", "on", "draft", "draft=", "heads=", "off=1", "lookup=", "Auto", "=x"])
def test_any_other_value_is_refused_by_a_sentence_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="auto, off, lookup, draft=MODEL or heads=FOLDER"):
        parse_speculate(text)


def test_the_command_line_refuses_a_wrong_value() -> None:
    with pytest.raises(ConfigError, match="not 'ngram'"):
        resolve({}, {"speculate": "ngram"})
    assert resolve({}, {"speculate": "off"}).engine.speculate == "off"


def test_an_engine_refuses_a_wrong_value_before_it_loads_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--speculate"):
        tiny_engine(tmp_path / "no such model", speculate="ngram")


def test_a_model_that_writes_no_text_has_no_drafter() -> None:
    with pytest.raises(ConfigError, match="--speculate draft=small could draft"):
        build_drafter(Speculate("draft", "small"))


def test_off_drafts_nothing() -> None:
    assert build_drafter(Speculate("off"), [FixedDrafter(1, {"a"})]) is None


def test_auto_asks_the_drafters_of_the_model_first_and_lookup_alone_does_not() -> None:
    of_model = FixedDrafter(7, {"a"})
    prompt = [1, 2, 3, 4, 1, 2, 3]
    for kind, expected in (("auto", 7), ("lookup", 4)):
        drafter = build_drafter(parse_speculate(kind), [of_model])
        assert drafter is not None
        for name in ("a", "b"):
            drafter.add(request(name, prompt))
        drafts = drafter.propose({"a": 1, "b": 1})
        assert drafts["a"].token_ids == (expected,)
        assert drafts["b"] == Draft((4,), "lookup", drafts["b"].grade)


@pytest.mark.parametrize("verb", ["add", "append", "propose", "remove"])
def test_a_drafter_that_fails_is_switched_off_and_the_others_go_on(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, lookup = FixedDrafter(7, {"a"}), LookupDrafter()
    broken.fails_in = verb
    drafter = Drafters([broken, lookup])
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            drafter.add(request(name, [1, 2, 3, 4, 1, 2]))
            drafter.append(name, (3,))
            draft = drafter.propose({name: 2})[name]
            assert draft.drafter == ("lookup" if verb != "remove" or name == "b" else "fixed")
            drafter.remove(name)
    assert broken.calls.count(verb) == 1
    assert broken.calls[-1] == verb
    (record,) = caplog.records
    assert "FixedDrafter has failed and drafts no more" in record.getMessage()
    assert record.exc_info is not None


def test_an_engine_whose_drafter_fails_goes_on_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    asked = [request(name, [5, 6, 7, 8, 5, 6, 7], 20) for name in ("a", "b")]
    expected = run(tiny_engine(model), asked)

    def fail(self: LookupDrafter, request_id: str, token_ids: tuple[int, ...]) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(LookupDrafter, "append", fail)
    with caplog.at_level(logging.WARNING):
        got = run(tiny_engine(model, speculate="auto"), asked)
    assert {name: tokens(events) for name, events in got.items()} == {
        name: tokens(events) for name, events in expected.items()
    }
    assert sum("drafts no more" in record.getMessage() for record in caplog.records) == 1


def test_an_engine_drafts_by_default_and_off_turns_it_off(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    prompt = [5, 6, 7, 8] * 20
    for speculate, is_drafting in ((EngineConfig().speculate, True), ("lookup", True), ("off", False)):
        engine = tiny_engine(model, speculate=speculate)
        run(engine, [request("a", prompt, 60)])
        assert bool(engine.loop.stats().drafters) == is_drafting


def test_an_encoder_never_drafts(tmp_path: Path) -> None:
    engine = build_engine(
        EngineConfig(model=ModelConfig(model="bert", device="cpu", load_format="random")),
        write_bert(tmp_path / "bert"),
    )
    assert engine.loop.drafter is None
