"""A small identity provider: real keys, a real HTTP server for its key set, and tokens as good or bad as asked.

Whoever comes to /authorize is signed in as `user` at once, and sent back with a code, which /token exchanges for
tokens if the code's verifier comes with it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode

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
        self.user: dict[str, Any] = {"sub": "ann", "scope": "penstock:admin"}  # claims of those who sign in
        self.access_audience = "penstock"
        self.codes: dict[str, dict[str, str]] = {}  # the query of each sign-in
        self.authorizations: list[str | None] = []  # the headers of exchanges

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
            discovery |= {f"{name}_endpoint": f"{self.issuer}/{part}" for name, part in _ENDPOINTS.items()}
            return self.status, json.dumps(discovery).encode()
        return self.status, self.body or json.dumps({"keys": self.public_keys}).encode()

    def signed_in(self, query: dict[str, str]) -> str:
        """The address that a browser is sent back to."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = query
        answer = {"code": code, "state": query["state"], "iss": self.issuer}
        return f"{query['redirect_uri']}?{urlencode(answer)}"

    def exchanged(self, form: dict[str, str]) -> tuple[int, bytes]:
        asked = self.codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest())
        if (
            asked is None
            or asked["code_challenge"] != challenge.rstrip(b"=").decode()
            or any(asked[name] != form[name] for name in ("client_id", "redirect_uri"))
        ):
            return 400, b'{"error": "invalid_grant"}'
        claims = {"iss": self.issuer, "exp": time.time() + 600, **self.user}
        key_id = next(iter(self.private_keys))
        tokens = {
            "access_token": self.token(key_id, "ES256", claims | {"aud": self.access_audience}),
            "id_token": self.token(
                key_id, "ES256", claims | {"aud": asked["client_id"], "nonce": asked["nonce"]}
            ),
        }
        return 200, json.dumps(tokens | {"token_type": "Bearer", "expires_in": 600}).encode()


_ENDPOINTS = {"authorization": "authorize", "token": "token"}


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
            path, _, query = self.path.partition("?")
            if path == "/authorize":
                self.send_response(302)
                self.send_header("location", provider.signed_in(dict(parse_qsl(query))))
                self.send_header("content-length", "0")
                self.end_headers()
                return
            self.send(*provider.answer(self.path))

        def do_POST(self) -> None:
            provider.authorizations.append(self.headers["authorization"])
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            self.send(*provider.exchanged(dict(parse_qsl(body))))

        def send(self, status: int, body: bytes) -> None:
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
