"""Checks, before a process joins a shared fleet, that the machines which are there will understand it.

Machines trust each other by the join token, which signs the records of hosts. While tokens are changed, every machine
can verify the records of all others, because no machine uses a token that another does not have yet. A process that
can verify no record at all therefore has a wrong token, and could neither serve nor be served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.cluster.host_record import JoinTokens, is_signed, wire_version_of
from penstock.cluster.registry import LEASE_S, Registry, RegistryError, unusable
from penstock.core.errors import ConfigError
from penstock.core.messages import WIRE_VERSION

logger = logging.getLogger(__name__)

# Records of machines that have ended are there for as long as their lease, also after all tokens were replaced.
PATIENCE_S = LEASE_S + 2.0
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the records in a registry tell of the machines of a fleet."""

    num_known: int  # with one of our tokens
    num_strangers: int  # with another token
    versions: Mapping[int, int]  # of the known ones: how many speak each version of the messages

    @classmethod
    def of(cls, records: Mapping[str, bytes], tokens: JoinTokens) -> Neighbours:
        signed = [record for record in records.values() if is_signed(record)]
        bodies = [body for record in signed if (body := tokens.verified(record)) is not None]
        versions = Counter(version for body in bodies if (version := wire_version_of(body)) is not None)
        return cls(len(bodies), len(signed) - len(bodies), versions)

    @property
    def are_all_strangers(self) -> bool:
        return self.num_strangers > 0 and not self.num_known


async def check_neighbours(
    registry: Registry,
    tokens: JoinTokens,
    *,
    now: Callable[[], float] = time.monotonic,
    patience_s: float = PATIENCE_S,
) -> None:
    """Raises ConfigError if the registry cannot be used, and if all hosts have another join token, for longer than
    hosts that ended would be seen. Warns of hosts that speak another version of the messages."""
    give_up_s = now() + patience_s
    has_warned = False
    while True:
        try:
            found = Neighbours.of(await registry.records(), tokens)
        except RegistryError as error:
            raise unusable(error) from error
        if not found.are_all_strangers:
            break
        if now() >= give_up_s:
            raise ConfigError(
                f"The join token belongs to another fleet: {_hosts(found.num_strangers)} in the registry, and none "
                "has this token.",
                hint="Every machine of a fleet has the same PENSTOCK_JOIN_TOKEN. Two fleets need two registries.",
            )
        if not has_warned:
            logger.warning(
                "%s in the registry, and none has this machine's join token; this machine joins nothing, and gives "
                "up in %.0f s unless they leave",
                _hosts(found.num_strangers),
                patience_s,
            )
            has_warned = True
        await asyncio.sleep(LOOK_AGAIN_S)
    if found.num_strangers:
        logger.warning(
            "%d of the %d hosts in the registry have another join token than this machine, and are left out",
            found.num_strangers,
            found.num_strangers + found.num_known,
        )
    for version, count in found.versions.items():
        if version != WIRE_VERSION:
            logger.warning(
                "%s in the registry with version %d of the messages, and this machine speaks version %d: machines "
                "of the two versions serve side by side, and not together",
                _hosts(count),
                version,
                WIRE_VERSION,
            )


def _hosts(count: int) -> str:
    return "there is 1 host" if count == 1 else f"there are {count} hosts"
