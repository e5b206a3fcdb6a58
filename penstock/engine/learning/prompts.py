"""Prompts that a model answers to teach its head: built-in ones, or a file's. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

from penstock.core.errors import ConfigError

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
