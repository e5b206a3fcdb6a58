from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.router.index import Expectations, PrefixIndex


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]


def test_a_match_says_for_each_replica_how_much_of_the_chain_it_leads() -> None:
    index = PrefixIndex()
    first, second, third = index.open(), index.open(), index.open()
    index.store(first, chain(1, 2, 3, 4))
    index.store(second, chain(1, 2))
    index.store(third, chain(2, 3))  # without the start of the chain it is of no use
    assert index.match(chain(1, 2, 3, 9), first | second | third) == [(2, second), (3, first)]
    assert index.match(chain(1, 2, 3), second) == [(2, second)]
    assert index.match(chain(9), first | second) == []
    assert index.match([], first) == []


def test_a_removed_block_ends_the_match_of_that_replica_only() -> None:
    index = PrefixIndex()
    first, second = index.open(), index.open()
    for bit in (first, second):
        index.store(bit, chain(1, 2, 3))
    index.remove(first, chain(3, 2))
    assert index.match(chain(1, 2, 3), first | second) == [(1, first), (3, second)]
    index.remove(second, chain(3, 2, 1))
    index.remove(first, chain(1))
    assert len(index) == 0


def test_a_closed_bit_means_nothing_and_is_given_out_again_only_after_a_sweep() -> None:
    index = PrefixIndex()
    stays = index.open()
    index.store(stays, chain(1))
    for _ in range(200):
        bit = index.open()
        assert index.match(chain(1), bit) == []
        index.store(bit, chain(1, 2))
        index.close(bit)
    assert index.match(chain(1, 2), stays) == [(1, stays)]
    assert index.holders(block(2)) == 0
    assert bit.bit_length() <= 128


def test_what_is_used_stays_and_what_is_not_is_forgotten_when_there_is_no_room() -> None:
    index = PrefixIndex(max_entries=100)
    bit = index.open()
    index.store(bit, chain(1, 2, 3))
    for number in range(1000, 3000):
        index.store(bit, chain(number))
        assert len(index) <= 100
        assert index.match(chain(1, 2, 3), bit) == [(3, bit)]
    assert index.match(chain(1000), bit) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "match"]), st.integers(0, 40), st.integers(1, 8)),
        max_size=200,
    )
)
@settings(deadline=None)
def test_it_never_holds_more_than_it_may(steps: list[tuple[str, int, int]]) -> None:
    index = PrefixIndex(max_entries=10)
    bit = index.open()
    for verb, start, length in steps:
        hashes = chain(*range(start, start + length))
        if verb == "match":
            index.match(hashes, bit)
        else:
            getattr(index, verb)(bit, hashes)
        assert len(index) <= 10


class IndexMachine(RuleBasedStateMachine):
    """With enough room the index is exactly a set of blocks for each replica."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.model: dict[int, set[int]] = {self.index.open(): set() for _ in range(3)}

    @rule(which=st.integers(0, 2), start=st.integers(0, 12), length=st.integers(1, 6))
    def store(self, which: int, start: int, length: int) -> None:
        bit = list(self.model)[which]
        self.index.store(bit, chain(*range(start, start + length)))
        self.model[bit] |= set(range(start, start + length))

    @rule(which=st.integers(0, 2), start=st.integers(0, 12), length=st.integers(1, 6))
    def remove(self, which: int, start: int, length: int) -> None:
        bit = list(self.model)[which]
        self.index.remove(bit, chain(*range(start, start + length)))
        self.model[bit] -= set(range(start, start + length))

    @rule(which=st.integers(0, 2))
    def start_anew(self, which: int) -> None:
        bit = list(self.model)[which]
        del self.model[bit]
        self.index.close(bit)
        self.model[self.index.open()] = set()

    @invariant()
    def matches_are_right(self) -> None:
        if not hasattr(self, "index"):
            return
        everyone = 0
        expected: dict[int, int] = {}
        for bit, held in self.model.items():
            everyone |= bit
            depth = next((number for number in range(20) if number not in held), 20)
            if depth:
                expected[depth] = expected.get(depth, 0) | bit
        assert self.index.match(chain(*range(20)), everyone) == sorted(expected.items())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, deadline=None)


def test_an_expectation_holds_until_its_time_and_not_longer() -> None:
    index = PrefixIndex()
    expectations = Expectations(index)
    bit = index.open()
    expectations.expect(bit, chain(1, 2), now=0.0, ttl_s=10.0)
    expectations.expire(9.9)
    assert index.match(chain(1, 2), bit) == [(2, bit)]
    expectations.expire(10.0)
    assert index.match(chain(1, 2), bit) == []
    assert len(expectations) == len(index) == 0


def test_what_the_replica_confirms_stays() -> None:
    index = PrefixIndex()
    expectations = Expectations(index)
    bit = index.open()
    expectations.expect(bit, chain(1, 2, 3), now=0.0, ttl_s=10.0)
    expectations.settle(bit, chain(1, 2))
    index.store(bit, chain(1, 2))
    expectations.expire(20.0)
    assert index.match(chain(1, 2, 3), bit) == [(2, bit)]


def test_a_later_request_renews_what_is_expected() -> None:
    index = PrefixIndex()
    expectations = Expectations(index)
    bit = index.open()
    expectations.expect(bit, chain(1, 2), now=0.0, ttl_s=10.0)
    expectations.expect(bit, chain(1), now=5.0, ttl_s=10.0)
    expectations.expire(10.0)
    assert index.match(chain(1, 2), bit) == [(1, bit)]
    expectations.expire(15.0)
    assert index.match(chain(1), bit) == []


def test_expectations_are_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex()
    expectations = Expectations(index, max_blocks=10)
    bit = index.open()
    for number in range(50):
        expectations.expect(bit, chain(number * 2, number * 2 + 1), now=float(number), ttl_s=1000.0)
        assert len(expectations) <= 10
    assert index.match(chain(98), bit) == [(1, bit)]
    assert index.match(chain(0), bit) == []
