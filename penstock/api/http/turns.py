"""How much of what a connection has sent is parsed before other connections have their turn.

One read of a socket may hold thousands of tiny requests, chunks or frames, and each costs far more than its bytes.
"""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl

TURN_BYTES = 16 << 10  # parsed at once
MIN_PIECE_BYTES = 1 << 10  # of what a WebSocket has sent, whose frames cost more
MAX_TURN_PARTS = (
    64  # requests, pieces of bodies or frames in so many bytes, after which others have their turn
)


class HeldFlow(FlowControl):
    """Pauses reading until it is let go, whoever resumes it meanwhile: what was read must be parsed first."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def let_go(self, *, resume: bool) -> None:
        """`resume` says whether there was no other reason to pause."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
