"""Streaming must not matter: whatever the chunks, the same text comes out, and nothing hidden ever shows."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.gateway.guards.detector import Detector
from penstock.gateway.guards.policy import KINDS, blocklist_detectors, pii_detectors
from penstock.gateway.guards.scanner import Scanner, scan_whole

PATTERNS = (
    "ab",
    "a{2,5}",
    r"\bb{1,3}\b",
    "a.b",
    "(?:ab|ba){1,3}c?",
    "[^ab]{2}b",
    "ca?b?",
    "(?i)AB",
    "(?:a|ab)(?:c|bcd)",
    r"b\d{1,2}",
    "^a",
    "c$",
    r"(?m)^b\w?",
    "é[a-c]",
    r"\Wb",
    "a{2}b{0,2}c",
    "(?:b|)ac",
    "x?ab{2}",
)
ALPHABET = "abcdAB 1\né.ſK"

texts = st.text(ALPHABET, max_size=60)
patterns = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4, unique=True)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def streamed(pieces: list[str], scanner: Scanner) -> list[str]:
    return [*map(scanner.push, pieces), scanner.finish()]


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(0, 7), max_size=40), patterns, st.integers(0, 3))
@example("abab", [1, 1, 1], ["ab", "(?:ab|ba){1,3}c?"], 0)
@example("xk", [1], ["(?i)AB"], 0)
def test_chunks_do_not_matter(text: str, sizes: list[int], sources: list[str], num_stops: int) -> None:
    detectors = [Detector(f"L{index}", source) for index, source in enumerate(sources)]
    stops, hides = detectors[:num_stops], detectors[num_stops:]
    whole_scanner = Scanner(hides, stops)
    whole = scan_whole(text, whole_scanner)
    scanner = Scanner(hides, stops)
    shown = streamed(cut(text, sizes), scanner)
    assert "".join(shown) == whole
    assert scanner.spans == whole_scanner.spans
    assert (scanner.stopped is None) == (whole_scanner.stopped is None)
    for position in range(len(shown) + 1):
        assert whole.startswith("".join(shown[:position])), "what was shown is never taken back"


atoms = st.sampled_from(
    [
        "a",
        "b",
        "c",
        ".",
        "[ab]",
        "[^a]",
        r"\d",
        r"\w",
        r"\W",
        r"\s",
        r"\b",
        r"\B",
        "^",
        "$",
        "é",
        "(?i:a)",
        "(?i:K)",
    ]
)


def _combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(parts, min_size=2, max_size=3).map("".join),
        st.lists(parts, min_size=2, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.tuples(parts, st.integers(0, 2), st.integers(0, 2)).map(
            lambda repeat: f"(?:{repeat[0]}){{{repeat[1]},{repeat[1] + repeat[2]}}}"
        ),
    )


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(st.recursive(atoms, _combined, max_leaves=6), texts, st.lists(st.integers(0, 5), max_size=40))
@example("(?:(?:[^a]|(?i:K))){1,2}", "A1", [1])
def test_any_pattern_is_found_however_the_text_is_cut(source: str, text: str, sizes: list[int]) -> None:
    try:
        detector = Detector("X", source)
    except ConfigError:
        assume(False)
    scanner = Scanner([detector])
    shown = []
    for piece in cut(text, sizes):
        shown.append(scanner.push(piece))
        assert scanner.num_held_chars <= (detector.shape.max_chars or 0)
    shown.append(scanner.finish())
    expected = re.sub("\x00.*?\x01", "[X]", _marked(text, detector), flags=re.DOTALL)
    assert "".join(shown) == expected


@settings(max_examples=300, deadline=None)
@given(texts, st.lists(st.integers(0, 7), max_size=40), patterns)
def test_text_is_held_back_no_further_than_the_longest_match(
    text: str, sizes: list[int], sources: list[str]
) -> None:
    detectors = [Detector("L", source) for source in sources]
    longest = max(detector.shape.max_chars or 0 for detector in detectors)
    scanner = Scanner(detectors)
    for piece in cut(text, sizes):
        scanner.push(piece)
        assert scanner.num_held_chars <= longest
    scanner.finish()
    assert scanner.num_held_chars == 0


@settings(max_examples=300, deadline=None)
@given(texts, patterns)
def test_single_patterns_find_what_re2_finds(text: str, sources: list[str]) -> None:
    """Against the engine's own search over the whole text."""
    for source in sources:
        detector = Detector("X", source)
        expected = re.sub("\x00.*?\x01", "[X]", _marked(text, detector), flags=re.DOTALL)
        assert scan_whole(text, Scanner([detector])) == expected


def _marked(text: str, detector: Detector) -> str:
    pieces, done = [], 0
    for match in detector.compiled.finditer(text):
        pieces += [text[done : match.start()], "\x00", match.group(), "\x01"]
        done = match.end()
    return "".join([*pieces, text[done:]])


SECRETS = (
    "jo.doe+x@mail.example.co.uk",
    "DE89 3704 0044 0532 0130 00",
    "4111 1111 1111 1111",
    "+49 30 1234567",
    "192.168.17.4",
    "2001:db8::8a2e:370:7334",
    "123-45-6789",
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*SECRETS, "and", "the", "12", ".", "card no.", "A1", "é"]), max_size=12),
    st.lists(st.integers(1, 9), max_size=80),
)
def test_personal_data_never_shows_in_any_prefix(words: list[str], sizes: list[int]) -> None:
    text = " | ".join(words)
    detectors = pii_detectors(KINDS, {})
    shown = streamed(cut(text, sizes), Scanner(detectors))
    assert "".join(shown) == scan_whole(text, Scanner(detectors))
    for secret in SECRETS:
        assert secret not in "".join(shown)
        for position in range(len(shown)):
            assert secret[: len(secret) // 2 + 2] not in "".join(shown[: position + 1])


def test_prose_flows_word_by_word() -> None:
    scanner = Scanner(pii_detectors(KINDS, {}))
    assert scanner.push("Water flows ") == "Water flows "
    assert scanner.push("downhi") == ""
    assert scanner.push("ll.\n") == "downhill.\n"


def test_overlapping_finds_become_one_label() -> None:
    detectors = [Detector("FIRST", "abc"), Detector("SECOND", "cde"), Detector("THIRD", "xyz")]
    assert scan_whole("..abcde..xyz", Scanner(detectors)) == "..[FIRST]..[THIRD]"


def test_adjacent_finds_keep_their_labels() -> None:
    assert scan_whole("abab", Scanner([Detector("X", "ab")])) == "[X][X]"


def test_notes_are_found_but_neither_hidden_nor_held() -> None:
    scanner = Scanner(notes=[Detector("NOTE", "secret")])
    assert scanner.push("a sec") == "a sec"
    assert scanner.push("ret!") == "ret!"
    scanner.finish()
    assert [(span.start, span.end) for span in scanner.spans] == [(2, 8)]


def test_a_label_in_json_arguments_leaves_valid_json() -> None:
    scanner = Scanner(pii_detectors(KINDS, {}))
    pieces = ['{"card": 41111111', '11111111, "to": "a\\"b@exa', 'mple.com", "x": 1}']
    shown = "".join(scanner.push(piece, is_json=True) for piece in pieces) + scanner.finish(is_json=True)
    assert shown == '{"card": "[CREDIT_CARD]", "to": "a\\"[EMAIL]", "x": 1}'


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(.*a){20}", r"(\w+\s?)*!"],
)
def test_patterns_that_ruin_backtracking_engines_finish(pattern: str) -> None:
    """They would take longer than the universe is old with a backtracking engine."""
    detector = Detector("X", f"x(?:{pattern})")
    scan_whole("xa" + "a" * 20_000, Scanner(notes=[detector]))


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "missing"),
        (r"(?=a)b", "invalid perl operator"),
        (r"(a)\1", "invalid escape"),
        ("a*", "empty"),
        ("x{,5}", "different ways"),
        ("[[:alpha:]]", "different ways"),
    ],
)
def test_bad_patterns_are_refused_with_the_reason(pattern: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Detector("X", pattern)
    assert word in caught.value.message


def test_a_pattern_without_end_cannot_guard_streams() -> None:
    with pytest.raises(ConfigError, match="without end"):
        Detector("X", "ab+").check_streamable()
    with pytest.raises(ConfigError, match="1800 characters"):
        Detector("X", "a{900}b{900}").check_streamable()


def test_blocklist_terms_stand_alone_in_every_script() -> None:
    detectors = blocklist_detectors(
        "BAD", ["foo", "foo bar", "naïve", "日本"], [], ignore_case=True, whole_words=True
    )
    text = "Foo bars, foo bar, foobar, NAÏVE, naïves, foo"
    assert scan_whole(text, Scanner(detectors)) == "[BAD] bars, [BAD], foobar, [BAD], naïves, [BAD]"
    parts = blocklist_detectors("BAD", ["foo"], [], ignore_case=False, whole_words=False)
    assert scan_whole("foobar Foo", Scanner(parts)) == "[BAD]bar Foo"
