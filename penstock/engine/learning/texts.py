"""Texts that a model writes to teach its head, kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.messages import ModelCard
from penstock.core.request import SamplingParams
from penstock.engine.learning.prompts import HELD_OUT
from penstock.engine.offline import OfflineEngine

LONGEST_TEXT = 1024
ROUND_PROMPTS = 512
TEMPERATURES = (0.0, 1.0, 0.7)  # of the first, second and third answer to a prompt, and so on
TEXTS = "texts.safetensors"
OnStage = Callable[[str, float], None]  # the stage, and its finished share
Prompts = Callable[[ModelCard], Sequence[Sequence[int]]]  # the tokens of prompts, for a model


@dataclass(frozen=True, slots=True)
class TrainSettings:
    output: Path
    num_tokens: int  # of answers
    answer_tokens: int = 256  # of one answer, at most
    epochs: int = 8
    batch_tokens: int = 8192
    vocabulary: int | None = None  # tokens that the head can draft; None chooses
    seed: int = 0


@dataclass(slots=True)
class Texts:
    """Prompts with answers. Texts of the same prompt are all for training, or all held out."""

    prompts: list[int] = field(default_factory=list)  # the number of each text's prompt
    prompt_lens: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids)) - sum(self.prompt_lens)

    def chosen(self, *, held_out: bool) -> list[int]:
        return [index for index, prompt in enumerate(self.prompts) if (prompt % HELD_OUT == 0) is held_out]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{TEXTS}.part"
        columns = {
            "prompts": self.prompts,
            "prompt_lens": self.prompt_lens,
            "lengths": [len(ids) for ids in self.token_ids],
            "token_ids": [token_id for ids in self.token_ids for token_id in ids],
        }
        save_file(
            {name: torch.tensor(column, dtype=torch.int32) for name, column in columns.items()}, partial
        )
        partial.replace(folder / TEXTS)

    @classmethod
    def load(cls, folder: Path) -> Texts:
        try:
            columns = {name: tensor.tolist() for name, tensor in load_file(folder / TEXTS).items()}
            rest = iter(columns["token_ids"])
            token_ids = [[next(rest) for _ in range(length)] for length in columns["lengths"]]
            return cls(columns["prompts"], columns["prompt_lens"], token_ids)
        except (SafetensorError, OSError, KeyError, RuntimeError) as error:
            raise ModelLoadError(
                f"{folder / TEXTS} cannot be read: {error}.", hint="Remove the folder, and train again."
            ) from error


def write_texts(
    config: EngineConfig,
    model_path: Path,
    prompts: Prompts,
    settings: TrainSettings,
    texts: Texts,
    on_stage: OnStage,
) -> None:
    """Let the model answer prompts until the answers have enough tokens. What is there counts, and is kept."""
    if texts.num_tokens >= settings.num_tokens:
        return
    engine = OfflineEngine(config, model_path)
    try:
        room = min(engine.card.max_model_len, LONGEST_TEXT) - settings.answer_tokens
        fitting = [
            (number, prompt)
            for number, prompt in enumerate(prompts(engine.card))
            if 0 < len(prompt) <= max(room, 1)
        ]
        if not fitting:
            raise ConfigError(
                f"No prompt leaves room for an answer in the context of {engine.card.max_model_len}."
            )
        while texts.num_tokens < settings.num_tokens:
            begin = len(texts.prompts)
            missing = settings.num_tokens - texts.num_tokens
            count = min(ROUND_PROMPTS, -(-missing // settings.answer_tokens) + 1)
            batch = [fitting[index % len(fitting)] for index in range(begin, begin + count)]
            sampling = [
                SamplingParams(
                    max_tokens=min(settings.answer_tokens, engine.card.max_model_len - len(prompt)),
                    temperature=TEMPERATURES[index // len(fitting) % len(TEMPERATURES)],
                    seed=settings.seed + index,
                )
                for index, (_, prompt) in enumerate(batch, begin)
            ]
            answers = engine.generate([prompt for _, prompt in batch], sampling)
            for (number, prompt), answer in zip(batch, answers, strict=True):
                if answer.token_ids:
                    texts.prompts.append(number)
                    texts.prompt_lens.append(len(prompt))
                    texts.token_ids.append([*prompt, *answer.token_ids])
            if len(texts.prompts) == begin:
                raise ConfigError("The model answers none of the prompts.")
            texts.save(settings.output)
            on_stage("Writing answers", min(1.0, texts.num_tokens / settings.num_tokens))
    finally:
        engine.close()
