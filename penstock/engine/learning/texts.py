"""Prompts that a model answers to teach its head, built-in ones or those of a file, and the texts that the model
writes, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.messages import ModelCard
from penstock.core.request import SamplingParams
from penstock.engine.offline import OfflineEngine

Conversation: TypeAlias = tuple[tuple[str, str], ...]  # roles and texts
FEWEST_PROMPTS = 20
HELD_OUT = 20  # every so manyth prompt is kept for measurements

_TOPICS = """photosynthesis|the French Revolution|black holes|sourdough bread|compound interest
|the water cycle|chess openings|volcanoes|the human heart|solar panels|machine learning
|the Roman Empire|coral reefs|vaccines|electric cars|jazz music|the stock market|earthquakes
|the moon landing|gardening on a balcony|running a marathon|learning Spanish|a job interview
|time management|public speaking|sleep|meditation|a weekend in Paris|hiking in the Alps
|home networks|passwords|backups|a small bakery|renting a flat|saving energy at home|houseplants
|cats|honey bees|whales|the Great Wall of China|the Renaissance|Shakespeare's plays|poetry
|film photography|watercolour painting|the violin|football tactics|cycling in the city
|public transport|recycling|climate change|democracy|inflation|supply and demand|probability
|prime numbers|the Pythagorean theorem|gravity|atoms|acids and bases|DNA|evolution|the immune system
|nutrition|coffee|green tea|vegetable soup|pasta|board games|fairy tales|space telescopes|robots
|the internet|open-source software|databases|sorting algorithms|unit tests|version control""".replace(
    "\n", ""
).split("|")

_TEMPLATES = """Explain {} to a ten-year-old.|What is {}?|Write a short paragraph about {}.
|Give me five facts about {}.
|What are common misunderstandings about {}?|Write a short story in which {} plays a part.
|List the advantages and disadvantages of {}.|How did people think about {} a hundred years ago?
|Write a polite email to a colleague about {}.|Summarise the most important points about {} in three sentences.
|Write a poem about {}.|I am a beginner. How do I start with {}?|What questions should I ask an expert on {}?
|Make a table of important terms about {} with a short definition of each.|Why does {} matter today?
|Write a dialogue between a teacher and a student about {}.|Give step-by-step advice about {}.
|Translate into French: "I would like to know more about {}."|Compare {} with something similar.
|Write a quiz with four questions and answers about {}.|What would the world be like without {}?
|Suggest a title and an outline for a talk about {}.|Write a Python function whose docstring mentions {}.
|Write a Python class that stores records about {}, with two methods and an example.
|Write JSON that describes three items related to {}.|Write an SQL table and two queries for data about {}.
|Name a surprising connection between {} and music.|Write a product description related to {}.
|Plan a lesson of 45 minutes about {}.|Answer briefly: is {} useful for everyone?
|Rewrite in a friendlier tone: "You clearly know nothing about {}."|Write a news report about {}.
|Convince me that {} is interesting.|Tell me a joke about {} and explain the joke.""".replace("\n", "").split(
    "|"
)


def built_in_prompts() -> list[Conversation]:
    """Return every template with every topic. Neighbours differ in both."""
    return [
        (("user", _TEMPLATES[(number + shift) % len(_TEMPLATES)].format(topic)),)
        for shift in range(len(_TEMPLATES))
        for number, topic in enumerate(_TOPICS)
    ]


def held_out(prompts: list[Conversation]) -> list[Conversation]:
    """Return the prompts that training does not see."""
    return prompts[::HELD_OUT]


def read_prompts(path: Path) -> list[Conversation]:
    """Read a prompt from each line: plain text, or JSON with `prompt` or `messages` in a file named .jsonl."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompts in {path} cannot be read: {error}.") from error
    if len(lines) < FEWEST_PROMPTS:
        raise ConfigError(
            f"{path} has {len(lines)} prompts, which is too few to learn from.",
            hint=f"Give at least {FEWEST_PROMPTS}, one on each line, or leave --prompts out.",
        )
    if path.suffix != ".jsonl":
        return [(("user", line.strip()),) for line in lines]
    return [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _conversation(line: str, where: str) -> Conversation:
    try:
        row: Any = json.loads(line)
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        turns = tuple((message["role"], message["content"]) for message in messages)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: this is not JSON with `prompt` or `messages`.") from error
    while turns and turns[-1][0] == "assistant":  # the model answers itself
        turns = turns[:-1]
    if not turns or not all(isinstance(part, str) and part for turn in turns for part in turn):
        raise ConfigError(f"{where}: the conversation has no text to answer.")
    return turns


LONGEST_TEXT = 1024
ROUND_PROMPTS = 128  # answered between two checkpoints
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
            lengths, token_ids = columns["lengths"], columns["token_ids"]
            ends = list(accumulate(lengths))
            if (ends or [0])[-1] != len(token_ids) or not (
                len(lengths) == len(columns["prompts"]) == len(columns["prompt_lens"])
            ):
                raise ValueError("its parts do not fit together")
            parts = [token_ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
            return cls(columns["prompts"], columns["prompt_lens"], parts)
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
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
    """Let the model answer prompts until the answers have enough tokens. Existing answers count, and are kept."""
    num_written = texts.num_tokens
    if num_written >= settings.num_tokens:
        return

    def report(_index: int, token_ids: Sequence[int]) -> None:
        nonlocal num_written
        num_written += len(token_ids)
        on_stage("Writing answers", min(1.0, num_written / settings.num_tokens))

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
            answers = engine.generate([prompt for _, prompt in batch], sampling, report)
            for (number, prompt), answer in zip(batch, answers, strict=True):
                if answer.token_ids:
                    texts.prompts.append(number)
                    texts.prompt_lens.append(len(prompt))
                    texts.token_ids.append([*prompt, *answer.token_ids])
            if len(texts.prompts) == begin:
                raise ConfigError("The model answers none of the prompts.")
            texts.save(settings.output)
    finally:
        engine.close()
