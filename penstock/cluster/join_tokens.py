"""The secrets that the machines of a shared fleet have in common: they sign the records of the registry, and open the
way to engines."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from penstock.cluster.transport import KeyPair
from penstock.core.errors import ConfigError

MIN_TOKEN_CHARS = 20
HOST_RECORD = "penstock host record"  # what a signature is for


@dataclass(frozen=True, slots=True)
class JoinTokens:
    """The secrets that the machines of a fleet share. The first token signs; each of them is accepted. A new token is
    rolled out behind the old one, then in front of it, and then alone."""

    tokens: tuple[str, ...] = field(repr=False)

    @staticmethod
    def parse(text: str) -> JoinTokens:
        """Read tokens that are separated by commas."""
        tokens = tuple(token.strip() for token in text.split(",") if token.strip())
        if not tokens or any(len(token) < MIN_TOKEN_CHARS for token in tokens):
            raise ConfigError(
                f"A join token has at least {MIN_TOKEN_CHARS} characters.",
                hint="Make one with: openssl rand -hex 32, and give the same one to every machine of the fleet.",
            )
        return JoinTokens(tokens)

    def client_keys(self) -> KeyPair:
        """Return the CURVE keys that a machine with the first token connects with."""
        return _client_keys(self.tokens[0])

    def accepted_clients(self) -> tuple[str, ...]:
        """Return the public keys of all machines that may connect to an engine."""
        return tuple(_client_keys(token).public for token in self.tokens)

    def sign(self, body: bytes, purpose: str = HOST_RECORD) -> bytes:
        return _mac(self.tokens[0], purpose, body).encode() + b"\n" + body

    def verified(self, record: bytes, purpose: str = HOST_RECORD) -> bytes | None:
        """Return the body of a record, or None if no token signed it for this purpose."""
        mac, _, body = record.partition(b"\n")
        is_signed = any(
            hmac.compare_digest(mac, _mac(token, purpose, body).encode()) for token in self.tokens
        )
        return body if is_signed else None


def _client_keys(token: str) -> KeyPair:
    secret = z85.encode(hashlib.sha256(b"penstock client of engines\0" + token.encode()).digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


def _mac(token: str, purpose: str, body: bytes) -> str:
    return hmac.new(token.encode(), purpose.encode() + b"\0" + body, hashlib.sha256).hexdigest()
