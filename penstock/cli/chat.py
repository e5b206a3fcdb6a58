"""`penstock chat`: a conversation in the terminal, with a running server or one that the command starts. `penstock
generate`: one prompt in this process, without a server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import fetch_drafter, fetch_model, printable, sigterm_unwinds, spinner
from penstock.cli.options import config_options, model_argument
from penstock.core.engine_config import EngineConfig, ModelConfig
from penstock.core.errors import PenstockError, UsageError
from penstock.core.machine import free_port
from penstock.core.request import SamplingParams
from penstock.serve.environment import API_KEY_VARIABLE

if TYPE_CHECKING:
    from penstock.cli.clients import ChatClient

_DEFAULT_URL = "http://127.0.0.1:8000"
_POLL_S = 0.1
_STOP_TIMEOUT_S = 10.0
_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


@click.command(cls=PenstockCommand, short_help="Talk to a model in the terminal.")
@model_argument
@click.option("-m", "--message", help="Ask one question, print the answer and leave.")
@click.option("--url", help=f"URL of the server. Default: {_DEFAULT_URL} if it answers, else a new server.")
@click.option("--api-key", envvar=API_KEY_VARIABLE, show_envvar=True, help="API key of the server.")
@click.option("--system", help="System prompt.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer. Default: the server's."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.7,  # as on the chat page: small models ramble at the API's own default of 1
    show_default=True,
    help="0 always takes the most probable token.",
)
def chat(
    positional_model: str | None,
    message: str | None,
    url: str | None,
    api_key: str | None,
    system: str | None,
    **settings: Any,
) -> None:
    """Talk to MODEL in the terminal.

    A server that already runs is used if it serves MODEL. Otherwise one is started in the background, on a port
    of its own, and ends with the conversation.

    \b
      penstock chat
      penstock chat -m "What is the capital of France?"
      penstock chat qwen2.5-coder-1.5b
    """
    with _connect(positional_model, url, api_key) as (client, served_model):
        given = {name: value for name, value in settings.items() if value is not None}
        conversation = Conversation(client, served_model, system, given)
        if message is not None:
            conversation.ask(message)
            return
        click.echo(f"Talking to {served_model}. {_HELP}", err=True)
        _talk(conversation)


class Conversation:
    """The messages so far. Each answer is printed as it arrives and added to the messages."""

    def __init__(self, client: ChatClient, model: str, system: str | None, settings: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Print the answer. A question whose answer failed is removed from the messages; a stopped answer stays."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            with closing(self._client.answer(self._model, self.messages, **self._settings)) as answer:  # type: ignore[type-var]
                for piece in answer:
                    pieces.append(piece)
                    click.echo(printable(piece, keeps="\n\t"), nl=False)
        except PenstockError:
            self.messages.pop()
            raise
        finally:
            if pieces:
                click.echo()
                self.messages.append({"role": "assistant", "content": "".join(pieces)})


def _talk(conversation: Conversation) -> None:
    _enable_line_editing()
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                click.echo("The conversation is forgotten.", err=True)
            case _ if text.startswith("/"):
                click.echo(_HELP, err=True)
            case _:
                _ask_and_go_on(conversation, text)


def _ask_and_go_on(conversation: Conversation, text: str) -> None:
    """Ask, and continue the conversation after a stopped or refused answer."""
    try:
        conversation.ask(text)
    except KeyboardInterrupt:
        click.echo("(stopped)", err=True)
    except PenstockError as error:
        click.echo(f"Error: {error.message}" + (f"\nHint: {error.hint}" if error.hint else ""), err=True)


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  the import gives input() arrow keys and a history
    except ImportError:
        return


@contextmanager
def _connect(model: str | None, url: str | None, api_key: str | None) -> Iterator[tuple[ChatClient, str]]:
    """Yield a client, and the name of the model on its server."""
    from penstock.cli.clients import ChatClient

    with closing(ChatClient(url or _DEFAULT_URL, api_key)) as client:
        try:
            served = client.served_models()
        except UsageError:
            if url is not None:
                raise
            served = []
        chosen = model if model in served else None if model else next(iter(served), None)
        if chosen is not None:
            yield client, chosen
            return
        if url is not None:
            raise UsageError(
                f"The server at {url} does not serve {model or 'any model'}.",
                hint=f"It serves {', '.join(served) or 'nothing'}.",
            )
    own_model = model or ModelConfig().model
    fetch_model(own_model)  # in this process, which can show the progress
    with (
        sigterm_unwinds(),
        background_server(own_model) as own_url,
        closing(ChatClient(own_url, api_key)) as client,
    ):
        yield client, client.served_models()[0]


@contextmanager
def background_server(model: str) -> Iterator[str]:
    """Serve `model` on a free loopback port, yield the URL once it is ready, and end the server afterwards."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "penstock.main", "serve", "--model", model),
                *("--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "0"),
                "--no-require-keys",  # only this command uses the server
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C stops an answer, not the server
        )
        try:
            with spinner(f"Starting {model}"):
                _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    from penstock.cli.clients import ChatClient

    client = ChatClient(url)
    try:
        while not client.is_ready():
            if process.poll() is not None:
                raise _last_error(log)
            time.sleep(_POLL_S)
    finally:
        client.close()


def _last_error(log: IO[str]) -> UsageError:
    """Return the error that the server printed before it ended, with its hint."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    printed = {
        name: rest.strip() for name, separator, rest in (line.partition(":") for line in lines) if separator
    }
    message = (
        printed.get("Error") or f"The server did not start: {lines[-1] if lines else 'it printed nothing'}."
    )
    return UsageError(message, hint=printed.get("Hint", "`penstock serve` with --debug shows more."))


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
