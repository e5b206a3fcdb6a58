"""Keys are long, recognisable, checked before they are looked up, and compared in constant time."""

from __future__ import annotations

import hashlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.tenants import records
from penstock.gateway.tenants.records import digest_of, is_secret_of, new_secret, prefix_of


def test_a_key_begins_with_its_prefix_and_has_the_entropy_it_claims() -> None:
    made = [new_secret() for _ in range(200)]
    assert len({one.secret for one in made}) == len({one.prefix for one in made}) == 200
    for one in made:
        assert one.secret.startswith(one.prefix)
        assert one.prefix.startswith("sk-ps-")
        assert len(one.secret) == 6 + 10 + 32 + 6
        assert set(one.secret[6:]) <= set(string.ascii_letters + string.digits)
    assert len({one.secret[20] for one in made}) > 30  # letters are drawn from the whole alphabet


def test_what_is_kept_is_the_sha256_of_the_whole_key() -> None:
    made = new_secret()
    assert made.digest == hashlib.sha256(made.secret.encode()).digest()
    assert is_secret_of(made.digest, made.secret)
    assert not is_secret_of(made.digest, new_secret().secret)
    assert prefix_of(made.secret) == made.prefix


def test_its_repr_shows_no_secret() -> None:
    made = new_secret()
    assert made.secret not in repr(made)
    assert made.digest.hex() not in repr(made)
    assert made.prefix in repr(made)


@given(st.integers(6, 53), st.sampled_from(string.ascii_letters + string.digits))
def test_one_wrong_letter_is_noticed_without_a_lookup(place: int, letter: str) -> None:
    secret = new_secret().secret
    changed = secret[:place] + letter + secret[place + 1 :]
    assert (prefix_of(changed) is None) == (changed != secret)


@given(st.text(max_size=80))
def test_arbitrary_text_is_no_key(text: str) -> None:
    assert prefix_of(text) is None
    assert prefix_of("sk-ps-" + text) is None


def test_digests_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[object, object]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(records.hmac, "compare_digest", compare)
    assert is_secret_of(digest_of("a"), "a")
    assert compared == [(digest_of("a"), digest_of("a"))]
