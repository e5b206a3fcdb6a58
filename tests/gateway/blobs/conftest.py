from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.blobs.object_store import ObjectStore, running_store


@pytest.fixture(scope="package")
def object_store() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store
