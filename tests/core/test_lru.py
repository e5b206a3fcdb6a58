"""The least recently used entries leave first, and what all weigh stays within the capacity."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.lru import LruCache

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "peek", "pop", "shrink"]), st.integers(0, 6), st.integers(0, 9))
)


@given(STEPS)
def test_it_holds_what_a_plain_list_of_uses_says(steps: list[tuple[str, int, int]]) -> None:
    cache, capacity = LruCache[int, str](12, lambda key, value: len(value)), 12
    model: OrderedDict[int, str] = OrderedDict()
    for action, key, size in steps:
        if action == "put":
            cache.put(key, "x" * size)
            model.pop(key, None)
            if size <= capacity:
                model[key] = "x" * size
        elif action == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif action == "peek":
            assert cache.peek(key) == model.get(key)
        elif action == "pop":
            assert cache.pop(key) == model.pop(key, None)
        else:
            capacity = size
            cache.shrink_to(capacity)
        while sum(map(len, model.values())) > capacity:
            model.popitem(last=False)
        assert cache.used == sum(map(len, model.values())) <= cache.capacity
        assert {key for key in range(7) if key in cache} == model.keys()
    cache.clear()
    assert (len(cache), cache.used) == (0, 0)
