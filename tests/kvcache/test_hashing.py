from __future__ import annotations

from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from penstock.kvcache import chain_hash, chain_hashes, root_hash

# Ids from 2^31 on are in no vocabulary, but clients may send them.
TOKENS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 2**70), max_size=40)


@given(TOKENS, st.integers(1, 8))
def test_hashing_at_once_equals_hashing_block_by_block(token_ids: list[int], block_size: int) -> None:
    parent = root_hash("tenant")
    expected = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain_hash(parent, token_ids[start : start + block_size])
        expected.append(parent)
    assert chain_hashes(root_hash("tenant"), token_ids, block_size) == expected


def test_a_hash_covers_everything_before_its_block() -> None:
    first = chain_hashes(root_hash(""), [1, 2, 3, 4], 2)
    second = chain_hashes(root_hash(""), [9, 2, 3, 4], 2)
    assert first[1] != second[1]


def test_tenants_with_the_same_prompt_share_no_hash() -> None:
    ours = chain_hashes(root_hash("a"), range(64), 16)
    theirs = chain_hashes(root_hash("b"), range(64), 16)
    assert not set(ours) & set(theirs)


def test_no_salt_can_imitate_a_block() -> None:
    parent = root_hash("victim")
    block = parent + array("i", range(16)).tobytes()
    imitation = block.decode("latin-1")
    assert blake2b(block, digest_size=16).digest() == chain_hash(parent, range(16))
    assert root_hash(imitation) != chain_hash(parent, range(16))
    assert root_hash("A" * 80) != blake2b(b"A" * 80, digest_size=16).digest()


def test_blocks_before_a_large_id_have_their_usual_hashes() -> None:
    usual = chain_hashes(root_hash(""), [1, 2, 3, 4], 2)
    large = chain_hashes(root_hash(""), [1, 2, 3, 2**31], 2)
    assert large[0] == usual[0]
    assert large[1] != usual[1]
