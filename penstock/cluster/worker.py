"""The engine process: messages in, steps, messages out. Run as `python -m penstock.cluster.worker`.

The only module of this room that imports the engine. One thread does everything: it drains its inbox between steps,
so a request or an abort takes effect at the next step, and sends one message per step to each gateway, or one per
millisecond where steps are shorter.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import zmq

from penstock.core.config import EngineConfig
from penstock.core.errors import PenstockError
from penstock.core.log_format import formatter
from penstock.core.messages import (
    AbortRequests,
    AddRequest,
    Codec,
    EngineFailed,
    EngineStats,
    FromEngine,
    Hello,
    LoadProgress,
    RequestRejected,
    Shutdown,
    StepOutputs,
)
from penstock.core.plan import TokenEvent
from penstock.engine.build import Engine, build_engine

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.25  # how often an idle engine looks for expired requests and for its parent
STATS_INTERVAL_S = 0.1
NEWS_INTERVAL_S = 0.001  # the news of steps that take less travel together
_READABLE = int(zmq.POLLIN)


class Worker:
    """Serves any number of gateways; a request belongs to the one that sent it."""

    def __init__(self, endpoint: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a gateway that has gone is noticed
        self._socket.bind(endpoint)
        self._gateways: dict[bytes, None] = {}
        self._gateway_of: dict[str, bytes] = {}
        self._engine: Engine | None = None
        self._stopping = False
        self._stats_sent_s = 0.0
        self._news: list[TokenEvent] = []  # not sent yet
        self._news_since_s = 0.0
        self._parent = os.getppid()

    def start(self, config: EngineConfig, model_path: Path) -> None:
        def progress(stage: str, fraction: float) -> None:
            self._read_inbox(0.0)
            self._broadcast(LoadProgress(stage, fraction))

        self._engine = build_engine(config, model_path, on_progress=progress)
        # What is loaded stays: the collector need not walk over it again and again between steps.
        gc.collect()
        gc.freeze()
        self._broadcast(self._engine.ready)

    def run(self) -> None:
        engine = self._engine
        if engine is None:
            raise RuntimeError("start() comes first")
        loop = engine.loop
        while not self._stopping:
            busy = loop.has_work
            self._read_inbox(0.0 if busy else IDLE_POLL_S)
            if os.getppid() != self._parent:
                log.warning("the gateway process has gone; leaving")
                return
            was_busy = busy or loop.has_work
            self._add_news(loop.step())
            is_idle = not loop.has_work
            news = self._take_news(at_once=is_idle or loop.step_s >= NEWS_INTERVAL_S)
            self._send_outputs(news, self._due_stats(at_once=is_idle and was_busy))
            for rejected in loop.take_rejections():
                gateway = self._gateway_of.pop(rejected.request_id, None)
                if gateway is not None:
                    self._send(gateway, rejected)

    def report_failure(self, error: BaseException) -> None:
        if isinstance(error, PenstockError):
            failure = EngineFailed(error.code, error.message, error.hint)
        else:
            failure = EngineFailed(
                "engine_unavailable", f"The engine stopped: {type(error).__name__}: {error}"
            )
        self._read_inbox(0.0)
        self._broadcast(failure)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._socket.close()
        self._context.term()

    def _read_inbox(self, wait_s: float) -> None:
        if wait_s > 0 and not self._socket.poll(int(wait_s * 1000)):
            return
        while self._has_mail:
            gateway, *messages = self._socket.recv_multipart()
            for data in messages:
                self._handle(gateway, data)

    @property
    def _has_mail(self) -> bool:
        """Asked before every step, and cheaper than to read in vain."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _handle(self, gateway: bytes, data: bytes) -> None:
        self._gateways[gateway] = None
        match self._codec.decode_to_engine(data):
            case AddRequest() as message:
                self._add(gateway, message)
            case AbortRequests(request_ids=request_ids):
                for request_id in request_ids:
                    self._gateway_of.pop(request_id, None)
                    if self._engine is not None:
                        self._engine.loop.abort(request_id)
            case Hello():
                if self._engine is not None:
                    self._send(gateway, self._engine.ready)
            case Shutdown():
                self._stopping = True

    def _add(self, gateway: bytes, message: AddRequest) -> None:
        request_id = message.request.id
        if self._engine is None:
            self._send(
                gateway,
                RequestRejected(request_id, "engine_unavailable", "The engine is still starting.", 1.0),
            )
            return
        try:
            self._engine.loop.add(message.request, message.timeout_s)
        except PenstockError as error:
            self._send(gateway, RequestRejected(request_id, error.code, error.message, error.retry_after_s))
        else:
            self._gateway_of[request_id] = gateway

    def _add_news(self, events: list[TokenEvent]) -> None:
        if events and not self._news:
            self._news_since_s = time.monotonic()
        self._news += events

    def _take_news(self, *, at_once: bool) -> list[TokenEvent]:
        """What is to be sent now. A message wakes three threads, so an engine whose steps take no time sends some
        steps' news in one."""
        if not self._news or not (at_once or time.monotonic() - self._news_since_s >= NEWS_INTERVAL_S):
            return []
        news, self._news = self._news, []
        return news

    def _due_stats(self, *, at_once: bool) -> EngineStats | None:
        now = time.monotonic()
        if self._engine is None or not (at_once or now - self._stats_sent_s >= STATS_INTERVAL_S):
            return None
        self._stats_sent_s = now
        return self._engine.loop.stats()

    def _send_outputs(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        """One message to each gateway that something happened for; stats are for all."""
        by_gateway: defaultdict[bytes, list[TokenEvent]] = defaultdict(list)
        for event in events:
            gateway = self._gateway_of.get(event.request_id)
            if gateway is None:
                continue
            by_gateway[gateway].append(event)
            if event.finish_reason is not None:
                del self._gateway_of[event.request_id]
        for gateway in tuple(by_gateway if stats is None else self._gateways):
            self._send(gateway, StepOutputs(tuple(by_gateway[gateway]), stats))

    def _broadcast(self, message: FromEngine) -> None:
        for gateway in tuple(self._gateways):
            self._send(gateway, message)

    def _send(self, gateway: bytes, message: FromEngine) -> None:
        try:
            self._socket.send_multipart((gateway, self._codec.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(gateway)

    def _forget(self, gateway: bytes) -> None:
        """It has gone, and nobody waits for what it asked for."""
        self._gateways.pop(gateway, None)
        for request_id in [known for known, owner in self._gateway_of.items() if owner == gateway]:
            del self._gateway_of[request_id]
            if self._engine is not None:
                self._engine.loop.abort(request_id)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="One Penstock engine. Started by `penstock serve`, not by hand."
    )
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model-path", required=True, type=Path)
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    arguments = parser.parse_args()
    handler = logging.StreamHandler()
    text_format = "%(asctime)s engine %(levelname)s %(message)s"
    handler.setFormatter(formatter(arguments.log_format, process="engine", text_format=text_format))
    logging.basicConfig(level=arguments.log_level, handlers=[handler])
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; the gateway drains first and then
    # sends Shutdown. If the gateway dies instead, run() notices.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    worker = Worker(arguments.endpoint)
    try:
        worker.start(config, arguments.model_path)
        worker.run()
    except PenstockError as error:
        worker.report_failure(error)
        return 1
    except Exception as error:
        log.exception("the engine failed")
        worker.report_failure(error)
        return 1
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
