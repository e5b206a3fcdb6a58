"""Drafts by lookup: matches, copies with changes, other answers of the tenant, and limits on memory."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.plan import PREDICTION, Draft
from penstock.core.request import Adapter, Request, SamplingParams
from penstock.engine.drafters import lookup
from penstock.engine.drafters.lookup import LookupDrafter
from penstock.engine.drafters.text_index import NO_TOKEN, RUN, TextIndex


def request(request_id: str, prompt: list[int], **fields: object) -> Request:
    sampling = fields.pop("sampling", SamplingParams(max_tokens=1000))
    return Request(id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling, **fields)


def propose(drafter: LookupDrafter, request_id: str, max_tokens: int = 8) -> Draft | None:
    return drafter.propose({request_id: max_tokens}).get(request_id)


def serve(drafter: LookupDrafter, each: Request, answer: list[int], max_tokens: int = 8) -> int:
    """Answer a request with the drafter's help. Returns the number of steps."""
    drafter.add(each)
    num_steps = position = 0
    while position < len(answer):
        draft = propose(drafter, each.id, max_tokens) if position else None
        num_accepted = 0
        if draft is not None:
            assert 0 < len(draft.token_ids) <= max_tokens
            assert 0 <= draft.grade < 8
            for drafted, token_id in zip(draft.token_ids, answer[position:], strict=False):
                if drafted != token_id:
                    break
                num_accepted += 1
        new = answer[position : position + num_accepted + 1]
        drafter.append(each.id, tuple(new))
        position += len(new)
        num_steps += 1
    drafter.remove(each.id)
    return num_steps


def test_an_answer_that_was_predicted_takes_few_steps() -> None:
    rng = random.Random(5)
    answer = words(rng, 120)
    prompt = words(rng, 30)
    predicted = request("r", prompt, prediction=tuple(answer))
    assert serve(LookupDrafter(), predicted, answer) <= 2 + 120 / 9
    drafter = LookupDrafter()
    drafter.add(predicted)
    draft = propose(drafter, "r")
    assert draft is not None
    assert (draft.token_ids, draft.drafter) == (tuple(answer[:8]), PREDICTION)


@pytest.mark.parametrize("num_other", [3, 40])
def test_an_answer_may_begin_otherwise_than_it_was_predicted(num_other: int) -> None:
    rng = random.Random(6)
    predicted, other = words(rng, 120), words(rng, num_other)
    each = request("r", words(rng, 30), prediction=tuple(predicted))
    assert serve(LookupDrafter(), each, other + predicted) <= num_other + 6 + 120 / 9


def test_a_prediction_is_followed_across_changes() -> None:
    rng = random.Random(7)
    predicted = words(rng, 200)
    answer = [*predicted[:50], 7, 8, 9, *predicted[52:130], *predicted[140:]]
    each = request("r", words(rng, 30), prediction=tuple(predicted))
    assert serve(LookupDrafter(), each, answer) <= 10 + 200 / 9


def test_an_answer_that_another_engine_began_goes_on_along_its_prediction() -> None:
    rng = random.Random(8)
    answer = words(rng, 60)
    each = request("r", words(rng, 30), prediction=tuple(answer), output_token_ids=tuple(answer[:20]))
    drafter = LookupDrafter()
    drafter.add(each)
    drafter.append("r", tuple(answer[20:23]))
    draft = propose(drafter, "r")
    assert draft is not None
    assert (draft.token_ids, draft.drafter) == (tuple(answer[23:31]), PREDICTION)


def test_a_wrong_prediction_keeps_no_other_draft_away() -> None:
    rng = random.Random(9)
    prompt = words(rng, 100)
    plain = serve(LookupDrafter(), request("r", prompt), prompt)
    misled = serve(LookupDrafter(), request("r", prompt, prediction=tuple(words(rng, 100))), prompt)
    assert misled <= plain + 25


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 5000) for _ in range(count)]


def replaced(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    result, place = [], 0
    while place < len(tokens):
        if tokens[place : place + len(old)] == old:
            result += new
            place += len(old)
        else:
            result.append(tokens[place])
            place += 1
    return result


def brute_force(tokens: list[int], context: list[int], max_length: int) -> tuple[int, int]:
    best = found = 0
    for place in range(len(tokens) - 1, 0, -1):
        length = 0
        while (
            length < min(max_length, place, len(context))
            and tokens[place - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length > best:
            best, found = length, place
    return (found, best) if best >= RUN else (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([1, 2, 7, 60, 300]), max_size=12),
    num_words=st.integers(2, 400),
    seed=st.integers(0, 2**32),
)
def test_a_search_finds_the_longest_and_latest_match(pieces: list[int], num_words: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    text = TextIndex()
    for size in pieces:
        piece = [rng.randrange(num_words) for _ in range(size)]
        tokens += piece
        text.tokens.extend(piece)
        place, length, _ = text.find(text.tokens, 16)
        expected = brute_force(tokens, tokens, 16)
        if num_words < 50:  # more places match than a search looks at
            assert length <= expected[1]
            assert tokens[place - length : place] == tokens[len(tokens) - length :]
        else:
            assert (place, length) == expected


def test_a_search_says_whether_other_places_are_followed_by_something_else() -> None:
    agreed = TextIndex([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3])
    assert agreed.find(agreed.tokens, 16) == (8, 3, 0)
    disputed = TextIndex([1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 1, 2, 3])
    assert disputed.find(disputed.tokens, 16) == (8, 3, 1)


def test_a_draft_is_what_followed_the_longest_match() -> None:
    drafter = LookupDrafter()
    drafter.add(request("a", [1, 2, 3, 4, 50, 51, 9, 2, 3, 4, 60, 61, 7, 1, 2, 3]))
    drafter.append("a", (4,))
    draft = propose(drafter, "a", max_tokens=2)
    assert draft == Draft((50, 51), "lookup", lookup.SHORT)


def test_a_short_match_makes_a_short_draft() -> None:
    text = words(random.Random(11), 40)
    for num_matched, most in ((3, 4), (5, 8), (9, 12)):
        drafter = LookupDrafter()
        drafter.add(request("a", [*text, 1, *text[10 - num_matched : 10]]))
        draft = propose(drafter, "a", max_tokens=12)
        assert draft is not None
        assert draft.token_ids == tuple(text[10 : 10 + most])
    disputed = LookupDrafter()
    disputed.add(request("a", [1, 2, 3, 50, 51, 52, 53, 1, 2, 3, 60, 61, 62, 63, 1, 2, 3]))
    assert propose(disputed, "a", max_tokens=12) == Draft((60, 61), "lookup", lookup.DISPUTED)


def test_nothing_is_drafted_for_a_match_of_two_tokens() -> None:
    drafter = LookupDrafter()
    drafter.add(request("a", [1, 2, 50, 51, 52, 8, 1, 2]))
    assert propose(drafter, "a") is None


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    drafter = LookupDrafter()
    drafter.add(request("a", [9, *[5, 6] * 6]))
    draft = propose(drafter, "a", max_tokens=7)
    assert draft is not None
    assert draft.token_ids == (5, 6, 5, 6, 5, 6, 5)


def test_a_copied_text_with_one_token_changed_costs_one_more_step_at_most() -> None:
    rng = random.Random(1)
    text = words(rng, 400)
    changed = [*text[:200], 6000, *text[201:]]
    plain = serve(LookupDrafter(), request("a", [7, 8, 9, *text, 7, 8, 9]), text)
    # The first step departs from the text. The second step has one token that agrees again.
    assert serve(LookupDrafter(), request("a", [7, 8, 9, *text, 7, 8, 9]), changed) <= plain + 2


@pytest.mark.parametrize(
    ("old", "new"), [([4], [5]), ([4], [5, 6, 7]), ([4, 5, 6], [7]), ([4, 5], [4, 6]), ([4, 5], [8, 5])]
)
def test_a_name_that_changes_everywhere_is_learned_once(old: list[int], new: list[int]) -> None:
    rng = random.Random(2)
    text: list[int] = []
    for _ in range(30):
        text += [*words(rng, rng.randrange(6, 20)), *old]
    answer = replaced(text, old, new)
    num_steps = serve(LookupDrafter(), request("a", [7, 8, 9, *text, 7, 8, 9]), answer)
    assert num_steps <= len(answer) / 9 + 12


def test_a_replacement_that_is_not_repeated_is_given_up() -> None:
    rng = random.Random(3)
    text: list[int] = []
    for _ in range(40):
        text += [*words(rng, 12), 4]
    answer = list(text)
    answer[answer.index(4)] = 5
    num_steps = serve(LookupDrafter(), request("a", [7, 8, 9, *text, 7, 8, 9]), answer)
    assert num_steps <= len(answer) / 9 + 12


def test_lines_that_are_left_out_or_added_do_not_end_a_copy() -> None:
    rng = random.Random(4)
    text = words(rng, 600)
    answer = [*text[:100], *text[112:300], *words(rng, 10), *text[300:420], *text[500:]]
    num_steps = serve(LookupDrafter(), request("a", [7, 8, 9, *text, 7, 8, 9]), answer)
    assert num_steps <= len(answer) / 9 + 30


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_words=st.integers(1, 12))
def test_any_texts_are_followed_without_an_error(seed: int, num_words: int) -> None:
    rng = random.Random(seed)
    drafter = LookupDrafter()
    for number in range(3):
        prompt = [rng.randrange(num_words) for _ in range(rng.randrange(1, 80))]
        answer = [rng.choice([*prompt, rng.randrange(num_words)]) for _ in range(rng.randrange(0, 120))]
        if rng.random() < 0.5:
            answer = replaced(prompt, prompt[:1], [num_words + 1]) + answer
        serve(drafter, request(str(number), prompt), answer, max_tokens=rng.choice([1, 3, 12]))


def test_tokens_that_come_before_a_draft_is_wanted_are_known() -> None:
    drafter = LookupDrafter()
    drafter.add(request("a", [1, 2, 3], output_token_ids=(4, 5, 6, 7)))
    drafter.append("a", (1, 2))
    drafter.append("a", (3,))
    draft = propose(drafter, "a", max_tokens=3)
    assert draft is not None
    assert draft.token_ids == (4, 5, 6)


def test_requests_that_have_no_answer_or_are_unknown_get_no_draft() -> None:
    drafter = LookupDrafter()
    prompt = [1, 2, 3, 4, 1, 2, 3]
    drafter.add(request("embedded", prompt, pooling="mean"))
    drafter.add(request("scored", prompt, sampling=SamplingParams(max_tokens=0)))
    drafter.append("unknown", (1,))
    drafter.remove("unknown")
    assert drafter.propose({"embedded": 4, "scored": 4, "unknown": 4}) == {}


def answered(**fields: object) -> tuple[LookupDrafter, list[int]]:
    """A drafter that has seen an answer to a request with these fields."""
    drafter = LookupDrafter()
    rng = random.Random(5)
    prompt, answer = words(rng, 20), words(rng, 60)
    serve(drafter, request("first", prompt, **fields), answer)
    return drafter, [*prompt, *answer]


def test_a_recent_answer_of_the_same_tenant_is_drafted() -> None:
    drafter, text = answered(tenant="acme", cache_salt="s")
    drafter.add(request("second", text[:20], tenant="acme", cache_salt="s"))
    draft = propose(drafter, "second", max_tokens=12)
    assert draft == Draft(tuple(text[20:32]), "lookup", lookup.FROM_ANSWER_LONG)
    num_steps = serve(drafter, request("third", text[:20], tenant="acme", cache_salt="s"), text[20:])
    assert num_steps <= 9


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "other", "cache_salt": "s"},
        {"tenant": "acme", "cache_salt": ""},
        {"tenant": "acme", "cache_salt": "t"},
        {"tenant": "", "cache_salt": "s"},
        {"tenant": "acme", "cache_salt": "s", "adapter": Adapter(name="sql", path="/x", digest="d")},
        {"tenant": "acme\0s", "cache_salt": ""},
    ],
    ids=["tenant", "no-salt", "salt", "no-tenant", "adapter", "joined"],
)
def test_answers_of_others_are_never_drafted(other: dict[str, object]) -> None:
    drafter, text = answered(tenant="acme", cache_salt="s")
    drafter.add(request("second", text[:50], **other))
    assert propose(drafter, "second") is None
    drafter.append("second", tuple(text[50:60]))
    assert propose(drafter, "second") is None


def test_a_salt_does_not_stand_for_an_adapter() -> None:
    adapter = Adapter(name="sql", path="/x", digest="d")
    drafter, text = answered(tenant="acme", cache_salt="s", adapter=adapter)
    drafter.add(request("second", text[:50], tenant="acme", cache_salt="s\0d"))
    assert propose(drafter, "second") is None


def test_a_draft_never_reaches_into_another_answer() -> None:
    drafter, text = answered()
    rng = random.Random(6)
    serve(drafter, request("second", words(rng, 20)), words(rng, 60))
    drafter.add(request("third", text[:-4]))
    draft = propose(drafter, "third", max_tokens=12)
    assert draft is not None
    assert draft.token_ids == tuple(text[-4:])
    drafter.append("third", tuple(text[-4:]))
    assert propose(drafter, "third") is None


def remembered(drafter: LookupDrafter) -> dict[tuple[str, str, str], int]:
    return {owner: recent.num_tokens for owner, recent in drafter._recent.items()}


def test_a_tenant_keeps_its_latest_answers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "TENANT_TOKENS", 400)
    drafter = LookupDrafter()
    rng = random.Random(7)
    texts = []
    for number in range(12):
        prompt, answer = words(rng, 20), words(rng, 50)
        serve(drafter, request(str(number), prompt), answer)
        texts.append([*prompt, *answer])
        assert sum(remembered(drafter).values()) <= 400
        assert drafter._num_remembered == sum(remembered(drafter).values())
    for number, text in enumerate(texts):
        drafter.add(request(f"again-{number}", text[:40]))
        is_known = propose(drafter, f"again-{number}") is not None
        assert is_known == (number >= 8)
    serve(drafter, request("long", [1]), words(rng, 5000))
    assert sum(remembered(drafter).values()) <= 400


def test_the_tenant_that_was_idle_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ALL_TOKENS", 300)
    drafter = LookupDrafter()
    rng = random.Random(8)
    texts = {}
    for tenant in ("a", "b", "c"):
        prompt, answer = words(rng, 20), words(rng, 70)
        serve(drafter, request(tenant, prompt, tenant=tenant), answer)
        texts[tenant] = [*prompt, *answer]
    drafter.add(request("used", texts["a"][:40], tenant="a"))
    assert propose(drafter, "used") is not None
    serve(drafter, request("d", words(rng, 20), tenant="d"), words(rng, 70))
    assert [tenant for tenant, _, _ in remembered(drafter)] == ["c", "a", "d"]
    assert drafter._num_remembered == sum(remembered(drafter).values()) <= 300


def test_short_answers_are_not_remembered() -> None:
    drafter = LookupDrafter()
    serve(drafter, request("a", list(range(10, 60))), [1, 2, 3])
    assert remembered(drafter) == {}


def test_a_removed_request_leaves_nothing_but_its_answer() -> None:
    drafter = LookupDrafter()
    prompt = words(random.Random(9), 500)
    serve(drafter, request("a", prompt), words(random.Random(10), 30))
    assert not drafter._followers
    assert remembered(drafter) == {("", "", ""): lookup.PROMPT_TAIL + 30 + 1}


def test_a_separator_matches_nothing() -> None:
    text = TextIndex([1, 2, NO_TOKEN, 3, 4, 5])
    assert text.find(array("i", [1, 2, 9]), 8) == (0, 0, 0)
