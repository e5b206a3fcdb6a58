"""Training a head for a tiny model: the head learns, training goes on after an interruption, and the written folder
computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.engine.learning import training
from penstock.engine.learning.texts import (
    FEWEST_PROMPTS,
    TEXTS,
    Texts,
    TrainSettings,
    built_in_prompts,
    read_prompts,
)
from penstock.engine.learning.trainable import shifted
from penstock.engine.learning.training import Trainer, draft_vocabulary, train_head
from penstock.models.drafters.heads import EagleHead, load_heads
from tests.engine.tiny import VOCAB_SIZE, write_tiny_model
from tests.models.test_heads import one_text

PROMPTS = [[3 + n, 40 + n, 7] for n in range(24)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def config(model: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=512),
        scheduler=SchedulerConfig(itl_target_ms=None),
        speculate="off",
        num_threads=1,
    )


def train(
    model: Path, output: Path, *, epochs: int = 3, resume: bool = False, vocabulary: int = 128
) -> Trainer:
    settings = TrainSettings(
        output, num_tokens=1200, answer_tokens=40, epochs=epochs, batch_tokens=400, vocabulary=vocabulary
    )
    return train_head(config(model), model, lambda card: PROMPTS, settings, lambda *_: None, resume=resume)


def test_a_head_learns_and_its_folder_computes_the_same(model: Path, tmp_path: Path) -> None:
    trainer = train(model, tmp_path / "head", epochs=5)
    losses = [point["loss"] for point in trainer.curve]
    assert losses[-1] < losses[0] * 0.9
    assert all(0 <= share <= 1 for point in trainer.curve for share in point["acceptance"])
    assert json.loads((tmp_path / "head" / "curve.json").read_text()) == trainer.curve
    lesson = trainer.lesson
    head = load_heads(tmp_path / "head", lesson.target, 64)
    assert isinstance(head, EagleHead)
    ids = torch.tensor([[5, 9, 14, 200, 31, 77, 8, 120]], dtype=torch.int32)
    embedded, hidden = lesson.states(ids)
    with torch.no_grad():
        wanted = trainer.head(embedded[:, 1:], hidden[:, :-1], [])[0]
        kv = lesson.target.ops.allocate_kv(1, 4, 16, head.num_kv_heads, head.head_dim)
        made = head.forward(ids[0, 1:], hidden[0, :-1], one_text(7), kv)
    torch.testing.assert_close(made, wanted, rtol=2e-2, atol=2e-2)  # the file has 16 bits
    assert lesson.draft_ids is not None
    assert set(head.argmax(made).tolist()) <= set(lesson.draft_ids.tolist())


def test_drafts_further_ahead_see_what_a_drafting_head_sees(model: Path, tmp_path: Path) -> None:
    """The second call of training computes what a head computes that continues from its own KV."""
    trainer = train(model, tmp_path / "head", epochs=1)
    lesson = trainer.lesson
    head = load_heads(tmp_path / "head", lesson.target, 64)
    assert isinstance(head, EagleHead)
    ids = torch.tensor([[5, 9, 14, 200, 31, 77]], dtype=torch.int32)
    embedded, hidden = lesson.states(ids)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        first = trainer.head(embedded[:, 1:], hidden[:, :-1], past)
        second = trainer.head(embedded[:, 1:], shifted(first, 1), past)
        third = trainer.head(embedded[:, 1:], shifted(second, 1), past)
        for at in (1, 2):  # true states up to this position, then the head's own
            kv = lesson.target.ops.allocate_kv(1, 4, 16, head.num_kv_heads, head.head_dim)
            features = hidden[0, : at + 1]
            for wanted in (first, second, third):
                count = len(features)
                made = head.forward(ids[0, 1 : count + 1], features, one_text(count), kv)
                torch.testing.assert_close(made[-1], wanted[0, count - 1], rtol=3e-2, atol=3e-2)
                features = torch.cat([features, made[-1:]])


def test_an_interrupted_training_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(model, tmp_path / "whole", epochs=2)
    write = training.write_head
    calls = []

    def fail_once(trainer: Trainer, folder: Path) -> None:
        write(trainer, folder)
        calls.append(trainer.step)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "write_head", fail_once)
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path / "parts", epochs=2)
    with pytest.raises(ConfigError, match="earlier training"):
        train(model, tmp_path / "parts", epochs=2)
    resumed = train(model, tmp_path / "parts", epochs=2, resume=True)
    assert calls[0] < resumed.num_steps == calls[-1]
    assert [point["epoch"] for point in resumed.curve] == [1, 2]
    for name, tensor in whole.head.state_dict().items():
        torch.testing.assert_close(resumed.head.state_dict()[name], tensor)


def test_answers_report_their_progress_while_they_are_written(model: Path, tmp_path: Path) -> None:
    reports: list[tuple[str, float]] = []
    settings = TrainSettings(tmp_path / "head", num_tokens=400, answer_tokens=40, epochs=1, vocabulary=128)
    train_head(config(model), model, lambda card: PROMPTS, settings, lambda *report: reports.append(report))
    shares = [share for stage, share in reports if stage == "Writing answers"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[0] < 0.2


def test_damaged_remains_and_those_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "head"
    train(model, output, epochs=1)
    for name, changes in (("wide", {"hidden_size": 128}), ("short", {"vocab_size": 16})):
        other = write_tiny_model(tmp_path / name, **changes)
        with pytest.raises(ConfigError, match="another model"):
            train(other, output, epochs=2, resume=True)
    with pytest.raises(ConfigError, match="can draft 128 tokens"):
        train(model, output, epochs=2, resume=True, vocabulary=200)
    (output / "training.pt").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match="cannot be resumed"):
        train(model, output, epochs=2, resume=True)
    columns = load_file(output / TEXTS)
    save_file({**columns, "token_ids": columns["token_ids"][:-1].clone()}, output / TEXTS)
    with pytest.raises(ModelLoadError, match="parts do not fit"):
        train(model, output, epochs=2, resume=True)
    (output / TEXTS).write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        train(model, output, epochs=2, resume=True)


def test_texts_of_one_prompt_are_never_split(tmp_path: Path) -> None:
    texts = Texts([0, 1, 20, 21, 0], [1] * 5, [[1, 2, 3]] * 5)
    assert texts.chosen(held_out=True) == [0, 2, 4]
    assert texts.chosen(held_out=False) == [1, 3]
    texts.save(tmp_path)
    assert Texts.load(tmp_path) == texts


def test_the_drafted_vocabulary_has_the_most_frequent_tokens() -> None:
    texts = Texts([1, 2], [1, 1], [[9, 5, 5, 7], [9, 7, 5, 6]])
    assert draft_vocabulary(texts, VOCAB_SIZE, 2).tolist() == [5, 7]  # type: ignore[union-attr]
    assert draft_vocabulary(texts, VOCAB_SIZE, None) is None


def test_built_in_prompts_are_many_and_distinct() -> None:
    prompts = built_in_prompts()
    assert len(set(prompts)) == len(prompts) > 2000
    assert all("{" not in text and text for prompt in prompts for _, text in prompt)


def test_prompts_come_from_text_and_json(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("\n\n".join(f"Question {n}?" for n in range(FEWEST_PROMPTS)))
    assert read_prompts(plain)[1] == (("user", "Question 1?"),)
    rows = [{"prompt": "Why?"}] * (FEWEST_PROMPTS - 1)
    chat = {"messages": [{"role": r, "content": "x"} for r in ("system", "user", "assistant")]}
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(map(json.dumps, [*rows, chat])))
    assert read_prompts(lines)[-1] == (("system", "x"), ("user", "x"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"only one", "too few"),
        (b"\xff\xfe\x00" * 50, "cannot be read"),
        (b"{}\n" * 30, "line 1: this is not JSON"),
        (b'{"prompt": ""}\n' * 30, "no text to answer"),
        (b"[1, 2\n" * 30, "not JSON"),
    ],
    ids=["few", "binary", "empty-object", "empty-prompt", "cut-off"],
)
def test_damaged_prompt_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_prompts(path)
