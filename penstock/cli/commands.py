"""The command `penstock`, which imports only the subcommand that is called, and the behaviour that all commands
share: one sentence for an error, options in groups, and `--debug`."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any

import click

from penstock import __version__
from penstock.cli.console import configure_logging
from penstock.cli.other_flags import answers_to
from penstock.core.errors import ConfigError, PenstockError
from penstock.serve.config import did_you_mean
from penstock.serve.environment import DEBUG_VARIABLE

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
# Errors that only the operator can mend, in any command.
_FAILURES_OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


class Failure(click.ClickException):
    """An error for the terminal: one sentence, then a hint."""

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it from the instance too

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {self.message}", err=True)
        if self.hint:
            click.echo(f"{click.style('Hint:', fg='yellow')} {self.hint}", err=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End the command with exit code 130 after Ctrl-C, also if cleaning up after Ctrl-C failed."""
    try:
        yield
    except click.exceptions.Exit:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if not _began_with_ctrl_c(error):
            raise
        click.echo("Interrupted.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


def _began_with_ctrl_c(error: BaseException) -> bool:
    """Return whether `error` is Ctrl-C, or was raised while Ctrl-C unwound the stack."""
    raised: BaseException | None = error
    while raised is not None and not isinstance(raised, KeyboardInterrupt):
        raised = raised.__context__
    return raised is not None


class PenstockCommand(click.Command):
    """A command that turns exceptions into sentences and shows its options in sections of `--help`.

    Options with a `section` attribute are listed under that heading, in the order they were added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                envvar=DEBUG_VARIABLE,
                show_envvar=True,
                expose_value=False,
                is_eager=True,
                callback=_remember_debug,
                help="Show tracebacks and detailed logs.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            answers = answers_to(given) if self._takes_settings() else {}
            if not answers:
                raise
            hints = [f"{flag}: {answer}" for flag, answer in answers.items()]
            raise Failure(
                f"Penstock has no {_listed(answers)}.", "\n      ".join(hints), EXIT_USAGE
            ) from None
        except click.UsageError as error:
            if not error.message.startswith("Got unexpected extra argument") or not self._takes_settings():
                raise
            message = f"{error.message}. A flag takes one value; repeat the flag for more."
            raise click.UsageError(message, ctx) from None

    def _takes_settings(self) -> bool:
        return any(hasattr(parameter, "section") for parameter in self.params)

    def invoke(self, ctx: click.Context) -> Any:
        debug = bool(ctx.meta.get("penstock.debug"))
        configure_logging(debug=debug)
        try:
            with _interruptible():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            raise  # click ends quietly when the reader of a pipe has gone
        except PenstockError as error:
            if debug:
                raise
            code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
            raise Failure(error.message, error.hint, code) from error
        except Exception as error:
            if debug:
                raise
            if isinstance(error, OSError) and error.errno in _FAILURES_OF_THE_MACHINE:
                place = f"{error.filename}: " if error.filename else ""
                raise Failure(f"{place}{error.strerror}.", None, EXIT_FAILURE) from error
            summary = str(error) or "no message"
            raise Failure(
                f"Penstock met an error it did not expect, {type(error).__name__}: {summary}",
                "Run the same command with --debug for the traceback, and please report it.",
                EXIT_FAILURE,
            ) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _listed(flags: Iterable[str]) -> str:
    *others, last = flags
    return f"{', '.join(others)} and {last}" if others else last


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["penstock.debug"] = True


class PenstockGroup(click.Group):
    """Commands in the order they were added, which is the order a newcomer needs them in."""

    command_class = PenstockCommand

    def invoke(self, ctx: click.Context) -> Any:
        with _interruptible():  # the subcommand is imported and its arguments are parsed in here
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            raise click.UsageError(f"There is no command '{name}'.{did_you_mean(name, known)}", ctx)
        return super().resolve_command(ctx, args)


# Each subcommand and the module of this room that defines it, in the order that a newcomer needs them in.
MODULES = {
    "serve": "serve",
    "engine": "serve",
    "gateway": "serve",
    "control": "serve",
    "top": "cluster",
    "release": "release",
    "experiment": "release",
    "settings": "database",
    "cluster": "cluster",
    "pull": "models",
    "list": "models",
    "show": "models",
    "rm": "models",
    "ps": "models",
    "chat": "chat",
    "generate": "chat",
    "quantize": "models",
    "draft": "draft",
    "keys": "keys",
    "workspaces": "tenants",
    "organizations": "tenants",
    "audit": "tenants",
    "usage": "database",
    "database": "database",
    "bench": "bench",
    "plan": "plan",
    "simulate": "simulate",
    "tune": "simulate",
    "doctor": "doctor",
    "version": "commands",
}


_NAMES = {"list": "list_models"}  # functions whose commands have the name of a Python built-in


class LazyGroup(PenstockGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        module = import_module(f"penstock.cli.{MODULES[cmd_name]}")
        command: click.Command = getattr(module, _NAMES.get(cmd_name, cmd_name))
        return command


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="penstock", message="%(prog)s %(version)s")
def penstock() -> None:
    """Penstock serves large language models to many people at once.

    Start with `penstock serve`, which fetches a small model and serves it on http://127.0.0.1:8000, or with
    `penstock chat`.
    """


@click.command(cls=PenstockCommand, short_help="Print the version.")
def version() -> None:
    """Print the version."""
    click.echo(__version__)
