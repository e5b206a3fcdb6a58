"""The small parts on their own: the heap, the length estimator, the headroom forecast."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.request import Grammar, Request, Tier
from penstock.kvcache import KVCache
from penstock.scheduler.admission import Headroom
from penstock.scheduler.keyed_heap import KeyedHeap
from penstock.scheduler.sequence import Sequence
from penstock.scheduler.step_builder import MIN_PREFILL_TOKENS, StepBuilder, StepLoad, StepTimePredictor
from penstock.scheduler.tenants import NUM_LENGTH_BINS, OutputLengthEstimator, TenantAccounts, length_bin
from tests.scheduler.strict import make_request


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5)), max_size=200))
def test_a_keyed_heap_is_a_sorted_dictionary(operations: list[tuple[bool, int, int]]) -> None:
    heap: KeyedHeap[str] = KeyedHeap()
    model: dict[int, int] = {}
    for pushes, number, key in operations:
        if pushes:
            heap.push(number, key, f"item {number}")
            model[number] = key
        else:
            heap.discard(number)
            model.pop(number, None)
        first = min(model, key=lambda n: (model[n], n), default=None)
        assert heap.first() == (None if first is None else f"item {first}")
        assert heap.first_key() == (None if first is None else model[first])
        assert len(heap) == len(model)
        assert sorted(heap.items()) == sorted(f"item {number}" for number in model)
        assert len(heap._entries) <= 2 * len(model) + 200


def test_what_a_keyed_heap_was_told_to_forget_does_not_pile_up() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    heap.push(-1, -1, -1)  # stays in front, so that nothing else surfaces
    for number in range(10_000):
        heap.push(number, number, number)
        heap.discard(number)
    assert len(heap._entries) < 100


def test_length_bins_double() -> None:
    assert [length_bin(n) for n in (0, 1, 16, 17, 32, 33, 64, 65)] == [0, 0, 0, 1, 1, 2, 2, 3]
    assert length_bin(10**9) == NUM_LENGTH_BINS - 1


def by(tenant: str, num_prompt_tokens: int = 4, grammar: Grammar | None = None) -> Request:
    request = make_request("r", num_prompt_tokens, tenant=tenant)
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


def test_without_history_an_answer_is_expected_to_be_moderate() -> None:
    lengths = OutputLengthEstimator()
    assert lengths.predict(by("t"), 0, 10_000) == 256
    assert lengths.predict(by("t"), 0, 40) == 40
    assert lengths.predict(by("t"), 300, 10_000) == 556


def test_each_tenant_is_judged_by_its_own_answers_once_there_are_some() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(10):
        lengths.observe(by("terse"), 10)
        lengths.observe(by("wordy"), 1000)
    assert lengths.predict(by("terse"), 0, 10_000) == 10
    assert lengths.predict(by("wordy"), 0, 10_000) == 1000
    assert lengths.predict(by("new"), 0, 10_000) == 1000  # the upper part of what everyone did


def test_a_longer_answer_than_any_before_is_expected_to_go_on() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(10):
        lengths.observe(by("terse"), 10)
    assert lengths.predict(by("terse"), 12, 10_000) == 16  # the end of the bin
    assert lengths.predict(by("terse"), 100, 10_000) == 356
    assert lengths.predict(by("terse"), 100, 120) == 120


def test_habits_change() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(300):
        lengths.observe(by("t"), 2000)
    for _ in range(200):
        lengths.observe(by("t"), 20)
    assert lengths.predict(by("t"), 0, 10_000) == 20


def test_a_tenant_is_judged_by_its_answers_to_such_prompts_once_there_are_some() -> None:
    lengths = OutputLengthEstimator("prompt")
    for _ in range(10):
        lengths.observe(by("t", 20), 1000)  # "write a story"
        lengths.observe(by("t", 500), 10)  # "classify this text"
        lengths.observe(by("t", 20, Grammar("json")), 40)
    assert lengths.predict(by("t", 25), 0, 10_000) == 1000
    assert lengths.predict(by("t", 400), 0, 10_000) == 10
    assert lengths.predict(by("t", 20, Grammar("json")), 0, 10_000) == 40
    assert lengths.predict(by("new", 400), 0, 10_000) == 10  # as everyone's answers to such prompts
    assert lengths.predict(by("t", 5000), 0, 10_000) == 1000  # as the tenant's answers to all prompts


def test_lengths_are_predicted_by_tenant_alone_or_not_at_all() -> None:
    by_tenant, off = OutputLengthEstimator("tenant"), OutputLengthEstimator("off")
    for lengths in (by_tenant, off):
        for _ in range(10):
            lengths.observe(by("t", 20), 1000)
            lengths.observe(by("t", 500), 10)
    assert by_tenant.predict(by("t", 400), 0, 10_000) == 1000
    assert off.predict(by("t", 400), 0, 10_000) == 256


def test_counts_of_answers_stay_finite() -> None:
    lengths = OutputLengthEstimator()
    for _ in range(5000):
        lengths.observe(by("t"), 20)
    assert lengths.predict(by("t"), 0, 10_000) == 20


def sequence_of(
    blocks_held: int, blocks_to_grow: int, ledger: TenantAccounts, tier: Tier = Tier.DEFAULT
) -> Sequence:
    sequence = Sequence(
        make_request("r", blocks_held * 16, tier=tier),
        1,
        0.0,
        length_limit=10_000,
        account=ledger.enter(""),
    )
    sequence.table = KVCache(blocks_held).open_table()
    sequence.table.fill(blocks_held * 16)
    sequence.predicted_length = (blocks_held + blocks_to_grow) * 16
    return sequence


def test_headroom_counts_what_shorter_requests_will_give_back() -> None:
    ledger = TenantAccounts()
    headroom = Headroom(16)
    for _ in range(4):
        headroom.enter(sequence_of(10, 1, ledger))  # about to end: four times ten blocks come back
    candidate = sequence_of(2, 8, ledger)
    assert headroom.allows(candidate, 2, num_spare=5)  # one block each until the four have ended
    assert not headroom.allows(candidate, 2, num_spare=4)


def test_headroom_adds_up_what_grows_together() -> None:
    ledger = TenantAccounts()
    headroom = Headroom(16)
    for _ in range(4):
        headroom.enter(sequence_of(2, 8, ledger))
    candidate = sequence_of(2, 8, ledger)
    assert headroom.allows(candidate, 2, num_spare=40)
    assert not headroom.allows(candidate, 2, num_spare=39)


def test_headroom_lets_an_urgent_request_count_on_what_batch_ones_hold() -> None:
    ledger = TenantAccounts()
    headroom = Headroom(16)
    headroom.enter(sequence_of(10, 16, ledger, Tier.BATCH))
    assert headroom.allows(sequence_of(2, 8, ledger), 2, num_spare=0)
    assert not headroom.allows(sequence_of(2, 8, ledger, Tier.BATCH), 2, num_spare=8)


@given(st.integers(1, 300), st.floats(0.02, 0.5))
def test_a_step_that_time_cuts_short_ends_with_a_whole_tile(num_decodes: int, target_s: float) -> None:
    predictor = StepTimePredictor()
    for _ in range(200):
        predictor.observe(StepLoad(decode_sequences=1), 0.005)
        predictor.observe(StepLoad(prefill_tokens=1000, decode_sequences=1), 0.105)
    draft = StepBuilder(8192, predictor, target_s, tile_tokens=128, block_size=16)
    draft.load.decode_sequences = num_decodes
    draft.num_tokens_left -= num_decodes
    in_time = predictor.prefill_tokens_within(target_s, draft.load, 0)
    room = draft.prefill_room(0)
    assert min(in_time, MIN_PREFILL_TOKENS) <= room <= max(in_time, MIN_PREFILL_TOKENS)
    if num_decodes + in_time >= 4 * 128 and room > MIN_PREFILL_TOKENS:
        assert (num_decodes + room) % 128 == 0
        assert in_time - room < 128
    else:
        assert room == max(in_time, MIN_PREFILL_TOKENS) or room == MIN_PREFILL_TOKENS
