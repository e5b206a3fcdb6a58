"""Terminals are counted as the matcher writes them out, whatever stands between them."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar
from penstock.gateway.text.grammars import GrammarChecker, StructuredOutputs
from penstock.gateway.text.terminals import expanded_size

LIMIT = 10**6


def copies(depth: int, count: int, name: str = "A", between: str = " ") -> str:
    """Each name stands for several of the next."""
    lines = [f"{name}{each}: {between.join([f'{name}{each + 1}'] * count)}" for each in range(depth)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{depth}: "x"'])


def test_terminals_count_wherever_they_are_named() -> None:
    assert expanded_size('start: A\nA: "ab" B B\nB: /c/', LIMIT) == (4 + 3 + 3) + 3
    assert expanded_size('start: a a\na: b b\nb: "x"', LIMIT) == 0, "rules are not written out"
    assert expanded_size("A: A A\nB: C\nC: B", LIMIT) < 10, "no terminal that names itself is ever compiled"


@pytest.mark.parametrize(
    "between", [" ", ' "q" ', " | ", ' /"/ ', " /a\n:b/ ", ' %json {"a": "b"} ', ' // "\n | ']
)
def test_nothing_hides_a_terminal(between: str) -> None:
    assert expanded_size(copies(6, 64, between=between), LIMIT) > LIMIT


@pytest.mark.parametrize("line", ['# "', "// /", '<"> ', "/[\n]/", '"#"', '"//" "'])
def test_no_text_or_comment_hides_what_follows(line: str) -> None:
    text = copies(6, 64)
    lines = [f"{each}\n | {line}" for each in text.split("\n")]
    assert expanded_size("\n".join(lines), LIMIT) > LIMIT


def test_a_long_grammar_is_counted_without_recursion() -> None:
    chain = copies(5000, 1)
    assert expanded_size(chain, LIMIT) == 5001 * len('"x"')
    assert expanded_size(copies(500, 2), LIMIT) > LIMIT


@pytest.mark.parametrize(
    "text", [copies(6, 64), copies(1000, 2), copies(10, 16, between=' "y" ')], ids=["64", "2", "16"]
)
async def test_terminals_that_would_take_all_memory_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(LLMatcher, "validate_grammar_with_warnings", _never)
    grammar = StructuredOutputs(grammar=text).to_grammar("structured_outputs")
    assert isinstance(grammar, Grammar)
    with pytest.raises(InvalidRequest, match="terminals have too many parts"):
        await GrammarChecker().check(grammar, {})


async def test_rules_may_be_named_often() -> None:
    grammar = Grammar("ebnf", copies(20, 8, "a"))
    assert (await GrammarChecker().check(grammar, {})).grammar == grammar


def _never(*_: object, **__: object) -> None:
    raise AssertionError("compiled")
