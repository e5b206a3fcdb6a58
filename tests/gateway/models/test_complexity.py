"""The classifier behind `model: "auto"`: what prompts call for, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.models.settings import WEIGHTS, Complexity, PromptText, Thresholds, assess

SMALL = (
    "Hi!",
    "What is the capital of France?",
    "Write a haiku about spring.",
    "Translate 'good morning' to Spanish.",
    "Please summarise this in one sentence: the cat sat on the mat.",
    "Wie heißt du?",
)
MEDIUM = (
    "Write a Python function that merges two sorted lists.",
    "Prove that the sum of the first n odd numbers is n^2.",
    "If a train goes 120 km in 2 hours and 180 km in 3 hours, what is its average speed? Explain step by step.",
    "Fix this:\n```python\ndef f(x):\n    return x +\n```",
    "Summarise: " + "the quick brown fox jumps over the lazy dog. " * 200,
)
LARGE = (
    "Design an algorithm in Rust for this, prove that it is correct, and explain why its complexity is O(n log n).",
    "Compare these designs and analyse the trade-offs. You must:\n- list risks\n- give a timeline\n- cite sources\n"
    "- not exceed 500 words\n- end with a plan\nAlso derive the cost: 3 * 40 = 120 and 120 / 7 = ?",
    "```sql\nSELECT * FROM a JOIN b\n```\nWhy is this SQL slow? " + "Here is the plan of the query. " * 300,
)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        *((text, Complexity.SMALL) for text in SMALL),
        *((text, Complexity.MEDIUM) for text in MEDIUM),
        *((text, Complexity.LARGE) for text in LARGE),
    ],
)
def test_examples(prompt: str, expected: Complexity) -> None:
    assessment = assess(PromptText(prompt))
    assert assessment.complexity is expected, assessment


def test_reasons_add_up_to_the_score_and_name_the_sign() -> None:
    assessment = assess(PromptText("Write a Python function that merges two sorted lists, and unit tests."))
    assert assessment.reasons[0][0] == "code"
    assert assessment.score == pytest.approx(sum(points for _, points in assessment.reasons))


@pytest.mark.parametrize(
    ("harder", "sign"),
    [
        (PromptText("Tell me.", context="Once upon a time there was a king. " * 300), "length"),
        (PromptText("", num_token_ids=4000), "length"),
        (PromptText("Tell me.", num_tools=3), "tools"),
        (PromptText("Tell me.", num_turns=8), "turns"),
        (PromptText("Tell me.", context="```python\nx = 1\n```"), "code"),
        (PromptText("你好，请告诉我今天的天气怎么样"), "language"),
        (PromptText("Quelle est la capitale de la France et combien d'habitants a-t-elle ?"), "language"),
    ],
)
def test_what_surrounds_a_question_counts(harder: PromptText, sign: str) -> None:
    plain = assess(PromptText("Tell me."))
    assessment = assess(harder)
    assert assessment.score > plain.score
    assert dict(assessment.reasons)[sign] > 0.02


def test_thresholds_decide_the_size() -> None:
    prompt = PromptText("Explain why the sky is blue.")
    score = assess(prompt).score
    assert assess(prompt, Thresholds(medium_from=score, large_from=1.0)).complexity is Complexity.MEDIUM
    assert assess(prompt, Thresholds(medium_from=0.0, large_from=score)).complexity is Complexity.LARGE
    assert assess(prompt, Thresholds(medium_from=1.0, large_from=1.0)).complexity is Complexity.SMALL


@given(st.text(max_size=300), st.text(max_size=300), st.integers(1, 50), st.integers(0, 50))
def test_any_text_gets_a_score(question: str, context: str, num_turns: int, num_tools: int) -> None:
    prompt = PromptText(question, context, num_turns=num_turns, num_tools=num_tools)
    assessment = assess(prompt)
    assert 0 <= assessment.score <= 1
    assert all(0 < points <= WEIGHTS[sign] for sign, points in assessment.reasons)
    assert assess(prompt) == assessment
