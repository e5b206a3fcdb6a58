"""`penstock generate`: complete one prompt in this process, without a server."""

from __future__ import annotations

import sys

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_drafter, fetch_model, spinner
from penstock.cli.options import config_options
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import PenstockError, UsageError
from penstock.core.request import SamplingParams


@click.command(cls=PenstockCommand, short_help="Complete one prompt, without a server.")
@click.argument("prompt")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most tokens to write."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, max=2),
    default=0.0,
    show_default=True,
    help="0 always takes the most probable token.",
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
              help="Sample from the most probable tokens that together have this probability.")  # fmt: skip
@config_options(EngineConfig)
def generate(prompt: str, max_tokens: int, temperature: float, top_p: float, config: EngineConfig) -> None:
    """Continue PROMPT with the model and stream the text to standard output.

    The prompt is taken as it is, without a chat template: use `penstock chat` for a conversation. A PROMPT of -
    is read from standard input.

    \b
      penstock generate "The capital of France is" --max-tokens 8
      penstock generate - --model ./my-model.gguf < prompt.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UsageError("The prompt is empty.", hint="Give some text to continue.")
    path = fetch_model(config.model.model)
    with spinner(f"Loading {config.model.model}"):
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream

        from penstock.engine.offline import OfflineEngine
        from penstock.models.load import load_tokenizer

        if path.is_dir() and load_tokenizer(path) is None:
            raise UsageError(
                f"'{config.model.model}' has no tokenizer, which text needs.",
                hint="Put the model's tokenizer.json into its folder.",
            )
        engine = OfflineEngine(fetch_drafter(config), path)
    if not engine.card.generates:
        engine.close()
        raise UsageError(
            f"'{config.model.model}' is an embedding model and writes no text.",
            hint="Serve it with `penstock serve`, and ask for /v1/embeddings.",
        )
    tokenizer = Tokenizer.from_str(engine.card.tokenizer_json.decode())
    decoder = DecodeStream(skip_special_tokens=True)

    def write(_: int, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            click.echo(decoder.step(tokenizer, token_id) or "", nl=False)

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    try:
        (completion,) = engine.generate([text], sampling, on_token=write)
    finally:
        click.echo()
        engine.close()
    if completion.error is not None:
        raise PenstockError(completion.error)
