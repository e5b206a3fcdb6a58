from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def nobodys_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that tests start keep their data here, and not where the user's own server has its keys."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
