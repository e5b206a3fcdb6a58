"""A small identity provider: real keys, a real HTTP server for its key set, and tokens as good or bad as asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class IdentityProvider:
    def __init__(self, port: int) -> None:
        self.issuer = f"http://127.0.0.1:{port}"
        self.private_keys: dict[str, PrivateKey] = {}
        self.public_keys: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        self.body: bytes | None = None  # instead of the key set
        self.claimed_issuer = self.issuer

    @property
    def jwks_url(self) -> str:
        return f"{self.issuer}/keys"

    def add_key(self, key_id: str, private_key: PrivateKey, **extra: Any) -> None:
        algorithm: Any = {
            rsa.RSAPrivateKey: RSAAlgorithm,
            ec.EllipticCurvePrivateKey: ECAlgorithm,
            ed25519.Ed25519PrivateKey: OKPAlgorithm,
        }[_kind(private_key)]
        public = algorithm.to_jwk(private_key.public_key(), as_dict=True)
        self.private_keys[key_id] = private_key
        self.public_keys.append({**public, "kid": key_id, "use": "sig", **extra})

    def token(
        self, key_id: str | None, algorithm: str, claims: dict[str, Any], *, signed_by: Any = None
    ) -> str:
        headers = {} if key_id is None else {"kid": key_id}
        key = (
            signed_by if signed_by is not None else self.private_keys[key_id or next(iter(self.private_keys))]
        )
        return jwt.encode(claims, key, algorithm, headers=headers)

    def answer(self, path: str) -> tuple[int, bytes]:
        self.paths.append(path)
        if path == "/.well-known/openid-configuration":
            discovery = {"issuer": self.claimed_issuer, "jwks_uri": self.jwks_url}
            return self.status, json.dumps(discovery).encode()
        return self.status, self.body or json.dumps({"keys": self.public_keys}).encode()


def _kind(private_key: PrivateKey) -> type:
    return next(
        kind
        for kind in (rsa.RSAPrivateKey, ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey)
        if isinstance(private_key, kind)
    )


@contextmanager
def running_provider() -> Iterator[IdentityProvider]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = provider.answer(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)  # a client that was sent too much hangs up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = IdentityProvider(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
