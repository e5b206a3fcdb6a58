"""The task that answers the requests of one connection, one after the other. A task of its own for each request would
cost more than all that a short request does in it."""

from __future__ import annotations

import asyncio

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class RequestWorker:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        server_tasks: set[asyncio.Task[None]],
    ) -> None:
        """`server_tasks` are the tasks that the server waits for when it shuts down."""
        self._loop = loop
        self._transport = transport
        self._server_tasks = server_tasks
        self._task: asyncio.Task[None] | None = None
        self._next: tuple[RequestResponseCycle, ASGI3Application] | None = None
        # Is done when the task shall look for the next request.
        self._idle: asyncio.Future[None] | None = None

    def answer(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._next = cycle, app
        if not self.wake():  # there is no task yet, or the task still ends the previous request
            self._task = self._loop.create_task(self._run())
            self._task.add_done_callback(self._server_tasks.discard)
            self._server_tasks.add(self._task)

    def wake(self) -> bool:
        """Wake the task if it is idle, and return whether it was. Without a next request, an idle task ends. A task
        that is busy looks for the next request by itself."""
        idle, self._idle = self._idle, None
        if idle is None or idle.done():  # a cancelled task leaves a future that is done
            return False
        idle.set_result(None)
        return True

    async def _run(self) -> None:
        current = asyncio.current_task()
        while self._next is not None and self._task is current:
            (cycle, app), self._next = self._next, None
            await cycle.run_asgi(app)
            if self._task is not current or self._transport.is_closing():
                return
            self._idle = self._loop.create_future()
            await self._idle
