"""What a process that listens needs, before it loads what answers."""

from __future__ import annotations

import logging
import resource
import sys

import msgspec

from penstock.api.http.protocol import ClientNoise
from penstock.core.config import ServeConfig
from penstock.core.gateway_config import ServerConfig

log = logging.getLogger(__name__)

RESERVED_FILES = 200  # that a server opens besides connections
THREAD_TURN_S = 0.001  # how long a thread, of the database say, may keep the event loop waiting


def prepare_process(config: ServeConfig) -> ServeConfig:
    """Once. Returns the settings that this system allows."""
    logging.getLogger("uvicorn.error").addFilter(ClientNoise())
    sys.setswitchinterval(THREAD_TURN_S)
    return msgspec.structs.replace(config, server=within_file_limit(config.server))


def within_file_limit(server: ServerConfig) -> ServerConfig:
    """Every connection is an open file, and a process may usually open 1,024. Ask for as many as are needed, and
    where the system does not give them, take fewer connections rather than fail to accept one."""
    wanted = server.max_connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return server
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return server
    log.info("the system allows %d open files, which bounds the connections", allowed)
    return msgspec.structs.replace(server, max_connections=max(1, allowed - RESERVED_FILES))
