"""An engine process that makes one token for every live request at a fixed pace, whatever the gateway does. Speaks
the engines' protocol over ZeroMQ and does nothing else.

    python -m bench.paced_engine ENDPOINT STEP_SECONDS

On SIGTERM it prints how late its latest step was, in seconds: a gateway that made it wait would show there.
"""

from __future__ import annotations

import signal
import sys
import time

import zmq

from penstock.core.messages import AbortRequests, AddRequest, Codec, EngineReady, Hello, StepOutputs
from penstock.core.plan import TokenEvent
from penstock.core.request import FinishReason
from penstock.engine.echo import ECHO_MODEL, echo_card

CONTEXT_TOKENS = 1 << 20
_TOKEN_ID = ord("a")


class PacedEngine:
    """Serves one gateway."""

    def __init__(self, endpoint: str, step_s: float) -> None:
        self._codec = Codec()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(endpoint)
        self._gateway = b""
        self._step_s = step_s
        self._remaining: dict[str, int] = {}  # tokens to go, by request id
        self._is_over = False

    def run(self) -> float:
        """Until `stop`; returns the worst lateness of a step."""
        latest_s = 0.0
        due_s = time.monotonic()
        while not self._is_over:
            self._read_until(due_s)
            if self._remaining:
                latest_s = max(latest_s, time.monotonic() - due_s)
                self._send(StepOutputs(tuple(map(self._next_token, list(self._remaining)))))
                due_s += self._step_s
            else:
                due_s = time.monotonic() + self._step_s
        return latest_s

    def stop(self) -> None:
        self._is_over = True

    def _read_until(self, moment_s: float) -> None:
        while (wait_s := moment_s - time.monotonic()) > 0 and not self._is_over:
            if self._socket.poll(wait_s * 1e3):
                self._gateway, *messages = self._socket.recv_multipart()
                for message in messages:
                    self._handle(message)

    def _handle(self, data: bytes) -> None:
        match self._codec.decode_to_engine(data):
            case Hello():
                card = echo_card(ECHO_MODEL, CONTEXT_TOKENS)
                self._send(
                    EngineReady(
                        card,
                        num_kv_blocks=1,
                        block_size=16,
                        max_num_seqs=1024,
                        max_output_tokens=CONTEXT_TOKENS,
                    )
                )
            case AddRequest(request=request):
                self._remaining[request.id] = request.sampling.max_tokens
            case AbortRequests(request_ids=request_ids):
                for request_id in request_ids:
                    self._remaining.pop(request_id, None)

    def _next_token(self, request_id: str) -> TokenEvent:
        self._remaining[request_id] -= 1
        if self._remaining[request_id]:
            return TokenEvent(request_id, (_TOKEN_ID,))
        del self._remaining[request_id]
        return TokenEvent(request_id, (_TOKEN_ID,), finish_reason=FinishReason.LENGTH)

    def _send(self, message: EngineReady | StepOutputs) -> None:
        self._socket.send_multipart((self._gateway, self._codec.encode(message)))


if __name__ == "__main__":
    engine = PacedEngine(sys.argv[1], float(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    print(engine.run(), flush=True)
