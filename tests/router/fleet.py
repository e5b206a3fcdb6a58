"""Small fleets and requests for the router's tests."""

from __future__ import annotations

from random import Random

from penstock.core.messages import EngineStats
from penstock.router import Decision, Replica, Router, RoutingRequest

MODEL = "model"
BLOCK_SIZE = 16
BASE_S, TOKEN_S = 0.01, 1e-4


def fleet(count: int, **changes: object) -> tuple[Replica, ...]:
    fields: dict[str, object] = {"models": frozenset({MODEL}), "num_kv_blocks": 10_000, **changes}
    return tuple(Replica(id=f"replica-{number}", **fields) for number in range(count))  # type: ignore[arg-type]


def chain(prefix: int, count: int) -> tuple[bytes, ...]:
    return tuple(f"{prefix:08}{depth:08}".encode() for depth in range(count))


class Harness:
    """A router and its fleet, asked in few words."""

    def __init__(self, router: Router, replicas: tuple[Replica, ...], seed: int = 0) -> None:
        self.router = router
        self.replicas = replicas
        self.rng = Random(seed)
        self.now = 0.0
        self._number = 0
        self._beats = 0
        router.update(replicas)
        for replica in replicas:
            self.learn_speed(replica.id)

    def learn_speed(self, replica_id: str, factor: float = 1.0, beats: int = 200) -> None:
        """Heartbeats of an idle replica whose steps take BASE_S, and TOKEN_S for each token."""
        for beat in range(beats):
            tokens = 1 + 100 * (beat % 20)
            self._beats += 1
            step_s = factor * (BASE_S + TOKEN_S * tokens)
            stats = EngineStats(num_steps=self._beats, step_tokens=tokens, step_s=step_s)
            self.router.heartbeat(replica_id, stats)

    def ask(self, hashes: tuple[bytes, ...] = (), **changes: object) -> Decision:
        self._number += 1
        fields: dict[str, object] = {
            "id": f"request-{self._number}",
            "model": MODEL,
            "num_prompt_tokens": len(hashes) * BLOCK_SIZE + 8,
            "block_hashes": hashes,
            **changes,
        }
        request = RoutingRequest(**fields)  # type: ignore[arg-type]
        return self.router.choose(request, self.replicas, self.now, self.rng)

    def answer(self, number: int) -> None:
        """The request with this number gets its first token, and ends."""
        self.router.first_token(f"request-{number}", self.now)
        self.router.ended(f"request-{number}", self.now)
