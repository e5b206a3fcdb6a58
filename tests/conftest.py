from __future__ import annotations

import os
from pathlib import Path

import pytest

# Without a GPU, Triton's kernels run in its interpreter (tests/triton), which is chosen for good when triton is first
# imported, and other libraries import it too.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def nobodys_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that tests start keep their data here, and not where the user's own server has its keys."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
