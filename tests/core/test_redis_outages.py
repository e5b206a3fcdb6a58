"""What errors of Redis say about the server."""

from __future__ import annotations

import pytest

from penstock.core.redis_outages import outage_of


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "Error running script (call to f_24): @user_script:17: @user_script: 17: -OOM command not allowed when "
            "used memory > 'maxmemory'.",
            "no memory",
        ),
        ("OOM command not allowed when used memory > 'maxmemory'.", "no memory"),
        ("command not allowed when used memory > 'maxmemory'.", "no memory"),
        ("You can't write against a read only replica.", "replica"),
        ("MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.", "disk"),
        ("NOREPLICAS Not enough good replicas to write.", "too few replicas"),
        ("CLUSTERDOWN The cluster is down", "cluster"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", None),
        ("Error running script: @user_script:4: user_script:4: attempt to compare nil with number", None),
        ("the key BLOOM-OOMPH has no value", None),
        ("", None),
    ],
)
def test_errors_of_the_server_are_told_from_those_of_a_command(message: str, said: str | None) -> None:
    found = outage_of(message)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
