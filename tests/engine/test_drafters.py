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
from penstock.engine.drafters.combination import FEW_REQUESTS, Drafters, build_drafter
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.models.catalog import SMOLLM2_135M, head_of
from penstock.models.drafters.files import read_heads
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
    assert build_drafter(Speculate("off"), [FixedDrafter(1, {"a"})], FixedDrafter(2, {"a"})) is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("auto", (7, 4, 9)), ("lookup", (4, 4, None)), ("heads=folder", (7, 9, 9)), ("draft=model", (7, 9, 9))],
)
def test_forced_tokens_go_first_and_a_head_drafts_what_lookup_does_not(
    kind: str, expected: tuple[int | None, ...]
) -> None:
    forced, head = FixedDrafter(7, {"forced"}), FixedDrafter(9, {"forced", "repeats", "new"})
    drafter = build_drafter(parse_speculate(kind), [forced], head)
    assert drafter is not None
    for name in ("forced", "repeats"):
        drafter.add(request(name, [1, 2, 3, 4, 1, 2, 3]))
    drafter.add(request("new", [1, 2, 3, 4, 5, 6]))
    drafts = drafter.propose({"forced": 1, "repeats": 1, "new": 1})
    found = tuple(
        drafts[name].token_ids[0] if name in drafts else None for name in ("forced", "repeats", "new")
    )
    assert found == expected


def test_auto_asks_a_head_for_few_requests_only() -> None:
    names = [f"r{number}" for number in range(FEW_REQUESTS + 1)]
    head = FixedDrafter(9, set(names))
    for kind, num_drafts in (("auto", 0), ("heads=folder", len(names))):
        drafter = build_drafter(parse_speculate(kind), (), head)
        assert drafter is not None
        for name in names:
            drafter.add(request(name, [1, 2, 3, 4, 5, 6]))
        assert len(drafter.propose(dict.fromkeys(names, 1))) == num_drafts
        assert len(drafter.propose(dict.fromkeys(names[:-1], 1))) == FEW_REQUESTS


def test_the_head_of_the_default_model_is_found_by_its_file_alone(tmp_path: Path) -> None:
    path = tmp_path / SMOLLM2_135M.file_name
    with path.open("wb") as file:
        file.truncate(SMOLLM2_135M.num_bytes)
    folder = head_of(path)
    assert folder is not None
    head = read_heads(folder)
    assert (head.settings["hidden_size"], head.settings["vocab_size"]) == (576, 49_152)
    with path.open("ab") as file:
        file.write(b"another model")
    assert head_of(path) is None
    assert head_of(tmp_path) is None


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
