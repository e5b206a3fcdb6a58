"""`penstock draft`: train heads that draft tokens for a model, and measure how often their drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.commands import PenstockCommand, PenstockGroup
from penstock.cli.console import (
    fetch_drafter,
    fetch_model,
    json_option,
    print_json,
    spinner,
    stages,
    stderr_console,
    stdout_console,
)
from penstock.cli.options import config_options, model_argument
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.core.messages import ModelCard
    from penstock.engine.learning.texts import Conversation

_prompts_option = click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File with a prompt on each line, or .jsonl with `prompt` or `messages`. Default: built-in prompts.",
)


@click.group(cls=PenstockGroup, short_help="Train and measure heads that draft tokens.")
def draft() -> None:
    """Train a head that drafts tokens for a model, and measure how often its drafts are accepted.

    \b
      penstock draft train smollm2-135m --output my-head
      penstock draft evaluate smollm2-135m --heads my-head
      penstock serve smollm2-135m --speculate heads=my-head
    """


@draft.command(cls=PenstockCommand, short_help="Train a head for a model.")
@model_argument
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True,
              help="Folder for the head, the answers it learns from, and the state of the training.")  # fmt: skip
@_prompts_option
@click.option("--tokens", type=click.IntRange(min=1000), default=200_000, show_default=True,
              help="Tokens of answers that the model writes, to learn from.")  # fmt: skip
@click.option("--epochs", type=click.IntRange(min=1), default=8, show_default=True,
              help="How often the head sees every answer.")  # fmt: skip
@click.option("--vocabulary", type=click.IntRange(min=64),
              help="Tokens that the head can draft, the most frequent, at most all. Default: a quarter.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the interrupted training in --output.")
@config_options(EngineConfig)
def train(
    output: Path,
    prompts: Path | None,
    tokens: int,
    epochs: int,
    vocabulary: int | None,
    resume: bool,
    config: EngineConfig,
) -> None:
    """Train an EAGLE head for MODEL from text that MODEL itself writes.

    MODEL answers the prompts; the head learns to predict MODEL's next hidden states. The head is written to --output
    in EAGLE's published format after every epoch, with its losses and acceptance in curve.json and curve.png.
    """
    from penstock.engine.learning.texts import built_in_prompts, read_prompts

    conversations = read_prompts(prompts) if prompts else built_in_prompts()
    path = fetch_model(config.model.model)
    with stages() as on_stage:
        from penstock.engine.learning.texts import TrainSettings
        from penstock.engine.learning.training import train_head

        trainer = train_head(
            _unspeculated(config),
            path,
            lambda card: encoded(card, conversations),
            TrainSettings(output, num_tokens=tokens, epochs=epochs, vocabulary=vocabulary),
            on_stage,
            resume=resume,
        )
    _plot(trainer.curve, output / "curve.png")
    _print_acceptance(trainer.curve[-1]["acceptance"])
    click.echo(f"Serve it with: penstock serve {config.model.model} --speculate heads={output}", err=True)


@draft.command(cls=PenstockCommand, short_help="Measure how often drafts are accepted.")
@model_argument
@click.option("--heads", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="Folder of the heads. Default: the drafter of --speculate.")  # fmt: skip
@_prompts_option
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=16, show_default=True,
              help="Prompts to answer, one after the other.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True,
              help="Most tokens of an answer.")  # fmt: skip
@json_option
@config_options(EngineConfig)
def evaluate(
    heads: Path | None,
    prompts: Path | None,
    num_requests: int,
    max_tokens: int,
    as_json: bool,
    config: EngineConfig,
) -> None:
    """Answer prompts with and without drafts, and report the share of accepted drafts by position and the speed.

    The built-in prompts here are those that `penstock draft train` holds out. Answers are the most probable ones, to
    one request at a time.
    """
    from penstock.engine.learning.texts import built_in_prompts, held_out, read_prompts
    from penstock.engine.learning.training import NUM_WARM_UPS, measure

    conversations = read_prompts(prompts) if prompts else held_out(built_in_prompts())
    path = fetch_model(config.model.model)
    speculating = fetch_drafter(
        config if heads is None else msgspec.structs.replace(config, speculate=f"heads={heads}")
    )

    def encode(card: ModelCard) -> list[list[int]]:
        return encoded(card, conversations[: num_requests + NUM_WARM_UPS])

    with spinner("Answering with drafts"):  # first, so that a drafter that does not fit is refused at once
        drafted = measure(speculating, path, encode, num_requests, max_tokens)
    with spinner("Answering without drafts"):
        plain = measure(_unspeculated(config), path, encode, num_requests, max_tokens)
    num_same = sum(a == b for a, b in zip(plain.answers, drafted.answers, strict=True))
    figures = {
        "tokens_per_s": drafted.tokens_per_s,
        "tokens_per_s_without": plain.tokens_per_s,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
        "same_answers": num_same,
        "requests": len(plain.answers),
        "drafters": drafted.drafters,
    }
    if as_json:
        print_json(figures)
        return
    for each in drafted.drafters:
        click.echo(f"{each.drafter}: {sum(each.drafted):,} tokens drafted, {sum(each.accepted):,} accepted")
        before = (each.drafted[0], *each.accepted)
        _print_acceptance([a / max(b, 1) for a, b in zip(each.accepted, before, strict=False)])
    click.echo(
        f"{drafted.tokens_per_s:,.1f} tokens/s, {plain.tokens_per_s:,.1f} without drafts "
        f"({figures['speedup']:.2f} ×); {num_same} of {len(plain.answers)} answers are the same."
    )


def _unspeculated(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(config, speculate="off")


def encoded(card: ModelCard, conversations: list[Conversation]) -> list[list[int]]:
    """Write conversations as the model's chat template does, or as plain text for a model without one."""
    from tokenizers import Tokenizer

    from penstock.core.messages import first_of_prompt, first_of_template
    from penstock.gateway.prompts import ChatMessage, ChatPrompt
    from penstock.gateway.text.template import ChatTemplate

    if not card.tokenizer_json or not card.generates:
        raise ConfigError(f"{card.name} has no tokenizer, or writes no text.")
    tokenizer = Tokenizer.from_str(card.tokenizer_json.decode())
    start = [*first_of_prompt(card, first_of_template(tokenizer))]
    if card.chat_template is None:
        texts = ["\n\n".join(text for _, text in turns) + "\n" for turns in conversations]
    else:
        template = ChatTemplate(card)
        chats = [ChatPrompt(messages=tuple(ChatMessage(*turn) for turn in turns)) for turns in conversations]
        texts, start = [template.render(chat).text for chat in chats], []
    return [start + tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _print_acceptance(shares: list[float]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("position", *map(str, range(1, len(shares) + 1))):
        table.add_column(heading, justify="right")
    table.add_row("accepted", *(f"{share:.1%}" for share in shares))
    stdout_console().print(table)
    expected, chain = 1.0, 1.0
    for share in shares:
        chain *= share
        expected += chain
    stderr_console().print(f"A step with {len(shares)} drafts gives {expected:.2f} tokens.")


def _plot(curve: list[dict[str, Any]], path: Path) -> None:
    """Draw loss and acceptance by epoch. Without matplotlib, only curve.json is written."""
    from penstock.bench.summary import require_matplotlib
    from penstock.core.errors import UsageError

    try:
        require_matplotlib()
    except UsageError as error:
        stderr_console().print(f"There is no {path.name}: {error.message} {error.hint}")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, acceptance = figure.subplots(1, 2)
    epochs = [point["epoch"] for point in curve]
    losses.plot(epochs, [point["loss"] for point in curve], marker="o")
    losses.set(xlabel="epoch", ylabel="training loss")
    for position in range(len(curve[0]["acceptance"])):
        shares = [100 * point["acceptance"][position] for point in curve]
        acceptance.plot(epochs, shares, marker="o", label=f"position {position + 1}")
    acceptance.set(xlabel="epoch", ylabel="accepted on held-out prompts, %", ylim=(0, 100))
    acceptance.legend()
    for axes in (losses, acceptance):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
