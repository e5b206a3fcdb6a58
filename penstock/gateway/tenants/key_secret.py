"""Makes, recognises and compares the secrets of keys. Knows no database.

A key reads `sk-ps-` + 10 letters that find its row + 32 letters of secret (190 bits) + 6 letters of checksum, all
base 62. The checksum turns typing mistakes and random guesses away before anything is looked up. Only the SHA-256 of
the whole is stored: with that much entropy in the secret, a slow password hash would protect nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

KEY_START = "sk-ps-"

_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_NUM_FINDING = 10
_NUM_SECRET = 32
_NUM_CHECKSUM = 6  # 62**6 > 2**32
PREFIX_LENGTH = len(KEY_START) + _NUM_FINDING
_SHAPE = re.compile(rf"{KEY_START}[0-9A-Za-z]{{{_NUM_FINDING + _NUM_SECRET + _NUM_CHECKSUM}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A new secret, which is shown to its owner once; only the prefix and the digest are stored."""

    secret: str = field(repr=False)
    prefix: str
    digest: bytes = field(repr=False)


def new_secret() -> NewSecret:
    letters = "".join(secrets.choice(_LETTERS) for _ in range(_NUM_FINDING + _NUM_SECRET))
    secret = KEY_START + letters + _checksum(KEY_START + letters)
    return NewSecret(secret, secret[:PREFIX_LENGTH], digest_of(secret))


def prefix_of(secret: str) -> str | None:
    """The prefix that finds the key's row; None when no key has this form."""
    if not _SHAPE.fullmatch(secret):
        return None
    if not hmac.compare_digest(_checksum(secret[:-_NUM_CHECKSUM]), secret[-_NUM_CHECKSUM:]):
        return None
    return secret[:PREFIX_LENGTH]


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def is_secret_of(digest: bytes, secret: str) -> bool:
    """Compare a secret with a digest, in a time that does not depend on how much of the secret is right."""
    return hmac.compare_digest(digest, digest_of(secret))


def _checksum(text: str) -> str:
    number = zlib.crc32(text.encode())
    letters = []
    for _ in range(_NUM_CHECKSUM):
        number, remainder = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[remainder])
    return "".join(letters)
