"""Tables of external servers are read again when their file changes; bad ones change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cluster.external.pool import ExternalPool
from penstock.core.errors import ConfigError
from penstock.serve.config import read_config_file, resolve
from penstock.serve.gateway import ExternalServers


def table(url: str) -> str:
    return f'[[external]]\nurl = "{url}"\nmodels = ["m"]\n'


def names(pool: ExternalPool) -> list[str]:
    return [view.name for view in pool.views()]


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(table("http://127.0.0.1:9"))
    config = resolve(read_config_file(path), {"external": ("http://127.0.0.1:11",)})
    pool = ExternalPool([])
    servers = ExternalServers(config, pool)
    await servers.refresh()
    assert names(pool) == ["127.0.0.1:9", "127.0.0.1:11"]
    path.write_text(table("http://127.0.0.1:9") + table("http://127.0.0.1:100"))
    await servers.refresh()
    assert names(pool) == ["127.0.0.1:9", "127.0.0.1:100", "127.0.0.1:11"]
    path.write_text(table("http://127.0.0.1:9") * 2)
    with pytest.raises(ConfigError, match="Two external servers"):
        await servers.refresh()
    await servers.refresh()  # is told of once
    assert len(names(pool)) == 3
    path.unlink()
    await servers.refresh()
    assert len(names(pool)) == 3
    path.write_text("")
    await servers.refresh()
    assert names(pool) == ["127.0.0.1:11"]
    await pool.close()
