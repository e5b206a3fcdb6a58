"""Errors of Redis that say something about the server, and nothing about the command. Knows no client.

Redis 6 puts the code of an error within a script behind words of its own, and clients know no class for some codes.
"""

from __future__ import annotations

import re

_SENTENCES = {
    "OOM": "it has no memory left for writes (maxmemory)",
    "READONLY": "it is a replica, which takes no writes",
    "MISCONF": "it cannot write to its disk, and takes no writes",
    "NOREPLICAS": "it has too few replicas to take writes (min-replicas-to-write)",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "CLUSTERDOWN": "its cluster is down",
    "LOADING": "it is still loading its data",
}
_CODE = re.compile(rf"(?:^|-)({'|'.join(_SENTENCES)})\b")
_WORDS = (  # of errors whose code the client has cut off
    ("command not allowed when used memory", "OOM"),
    ("can't write against a read only replica", "READONLY"),
)


def outage_of(message: str) -> str | None:
    """Return what is wrong with a Redis that answers with this error: the end of a sentence about Redis. None for
    errors of a command."""
    found = _CODE.search(message)
    code = found[1] if found else next((code for words, code in _WORDS if words in message), None)
    return None if code is None else _SENTENCES[code]
