from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def models_use_one_thread(one_thread: None) -> None: ...
