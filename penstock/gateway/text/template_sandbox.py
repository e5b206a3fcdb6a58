"""The environment in which chat templates run: what transformers gives templates, in a sandbox with bounds.

Templates are untrusted code from a checkpoint. A rendering ends with TemplateError when it takes too long, writes too
much, or asks for a single value of absurd size. Knows no chat.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDER_S = 10.0
MAX_RENDER_CHARACTERS = 1 << 27
MAX_FACTOR = 1 << 20  # of a repeated text or list, and of the widths that methods of texts take
_TICKS_PER_LOOK = 256
_BUDGET = "_penstock_budget"  # the variable that loops and macros report to


class _Budget:
    """Ends a rendering after its time. Each turn of a loop and each call of a macro is a tick."""

    __slots__ = ("_deadline", "_ticks")

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._ticks = 0

    def __call__(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0 and time.monotonic() > self._deadline:
            raise TemplateError("rendering takes too long")


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's words for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared by jinja2 as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach the interpreter's own."""

    def __init__(*args: Any, **names: Any) -> None:  # as jinja2's, so that `namespace(self=…)` works
        self, *rest = args
        for name in (given := dict(*rest, **names)):
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _PlainDict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict(*args, **names)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _to_json
        self.filters["center"] = lambda value, width=80: self._bounded(str(value).center, width)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _PlainDict()
        self.globals["namespace"] = _PlainNamespace
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow, as templates for llama.cpp let them. All lists belong to one rendering."""
        return (type(obj) is list and attr == "append") or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(each, int | float) and abs(each) <= MAX_FACTOR for each in (left, right)):
                raise SecurityError("the numbers of a power are too large")
        elif not (isinstance(left, int | float) and isinstance(right, int | float)):
            for number, value in ((left, right), (right, left)):
                if isinstance(number, int) and hasattr(value, "__len__") and number * len(value) > MAX_FACTOR:
                    raise SecurityError("a repeated text or list is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        if isinstance(getattr(called, "__self__", None), str):
            return self._bounded(super().call, context, called, *args, **options)
        return super().call(context, called, *args, **options)

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render within the bounds. Raises TemplateError, and whatever an expression of the template raises."""
        pieces: list[str] = []
        room = MAX_RENDER_CHARACTERS
        for piece in template.generate({**variables, _BUDGET: _Budget(MAX_RENDER_S)}):
            room -= len(piece)
            if room < 0:
                raise TemplateError(f"the text is longer than {MAX_RENDER_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _bounded(self, function: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(each, int) and abs(each) > MAX_FACTOR for each in (*args, *options.values())):
            raise SecurityError("a number is too large for a method of texts")
        return function(*args, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and begin each turn of a loop and each macro with a tick of the budget."""
        template = super()._parse(source, name, filename)
        blocks: list[nodes.For | nodes.Macro] = [
            *template.find_all(nodes.For),
            *template.find_all(nodes.Macro),
        ]
        for block in blocks:
            tick = nodes.Call(nodes.Name(_BUDGET, "load"), [], [], None, None)
            statement = nodes.ExprStmt(tick).set_lineno(block.lineno)
            statement.set_environment(self)
            block.body.insert(0, statement)
        return template


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name such as {name[:40]!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escapes for HTML, which jinja2's own filter adds. The arguments are transformers'."""
    return json.dumps(
        value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=sort_keys
    )
