"""The merged events of several caches describe what any of them has."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.messages import KeptEntry, KVCleared, KVRemoved, KVStored
from penstock.kvcache import KVCache, root_hash
from penstock.kvcache.block import IndexUnion
from tests.kvcache.chains import Mirror, hashes, remember


def test_a_hash_is_stored_once_and_removed_with_its_last_holder() -> None:
    union = IndexUnion(2)
    root, (a, b, c) = root_hash(""), hashes("abc")
    assert union.merge([[KVStored(0, (a, b), root)], [KVStored(0, (a, b, c), root)]]) == [
        KVStored(0, (a, b), root),
        KVStored(1, (c,), b),
    ]
    assert union.merge([[KVRemoved(1, (b, a))], []]) == []
    assert union.merge([[], [KVRemoved(1, (c, b))]]) == [KVRemoved(2, (c, b))]
    assert union.merge([[], [KVCleared(2)]]) == [KVRemoved(3, (a,))]
    assert union.merge([[], [KVCleared(3)]]) == []


def test_kept_prefixes_pass_through() -> None:
    union = IndexUnion(2)
    entry = KeptEntry(hashes("a")[0], 1, 5.0)
    assert union.merge([[], [KVStored(7, (), b"", (entry,))]]) == [KVStored(0, (), b"", (entry,))]


def test_a_restart_begins_with_cleared_and_all_that_any_cache_has() -> None:
    union, caches = IndexUnion(2), [KVCache(4), KVCache(4)]
    remember(caches[0], "ab")
    remember(caches[1], "ac")
    first = union.merge([cache.take_events() for cache in caches])
    union.restart()
    for cache in caches:
        cache.restart_events()
    again = union.merge([cache.take_events() for cache in caches])
    assert isinstance(again[0], KVCleared)
    mirror = Mirror()
    mirror.apply([*first, *again])
    assert mirror.hashes == {*hashes("ab"), *hashes("ac")}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("remember"), st.integers(0, 2), st.text("abc", min_size=1, max_size=4)),
        st.tuples(
            st.sampled_from(["clear", "restart one", "restart all", "read"]), st.integers(0, 2), st.just("")
        ),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(script=operations)
def test_random_caches(script: list[tuple[str, int, Any]]) -> None:
    union, mirror = IndexUnion(3), Mirror()
    caches = [KVCache(5) for _ in range(3)]
    for what, which, names in [*script, ("read", 0, "")]:
        if what == "remember":
            remember(caches[which], names)
        elif what == "clear":
            caches[which].pool.clear()
        elif what == "restart one":
            caches[which].restart_events()
        elif what == "restart all":
            union.restart()
            for cache in caches:
                cache.restart_events()
        else:
            mirror.apply(union.merge([cache.take_events() for cache in caches]))
            assert mirror.hashes == {each for cache in caches for each in cache.pool.index}
