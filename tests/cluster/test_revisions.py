from __future__ import annotations

import pytest

from penstock.cluster.staged_records import changed, revision_of, with_settings
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import InvalidRequest
from tests.cluster.control_stage import ENGINE, SPEC


def test_settings_are_found_by_name_whichever_section_they_are_in() -> None:
    changes = {"max_num_seqs": "64", "num_kv_blocks": 100, "dtype": "float32", "num_threads": "2"}
    engine = with_settings(EngineConfig(), changes)
    assert engine.scheduler.max_num_seqs == 64
    assert engine.cache.num_kv_blocks == 100
    assert engine.model.dtype == "float32"
    assert engine.num_threads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": "many"}, "cannot be 'many'"),
        ({"max_num_seqs": 0}, "cannot be 0"),
        ({"scheduler": {}}, "no engine setting 'scheduler'"),
        ({"served_model_name": "another"}, "no engine setting"),
        ({"port": 1}, "no engine setting 'port'"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        with_settings(EngineConfig(), changes)


def test_new_weights_keep_the_name_that_clients_use() -> None:
    spec = changed(SPEC, weights=("tuned", "/models/tuned"), settings={}, revision=None)
    assert spec.model_path == "/models/tuned"
    assert (spec.engine.model.model, spec.engine.model.served_model_name) == ("tuned", "echo")
    assert spec.model == "echo"
    assert spec.revision != SPEC.revision


def test_a_revision_is_named_after_what_it_is() -> None:
    assert revision_of(ENGINE, "a") == revision_of(ENGINE, "a")
    assert revision_of(ENGINE, "a") != revision_of(ENGINE, "b")
    assert revision_of(ENGINE, "a") != revision_of(EngineConfig(), "a")
    assert changed(SPEC, weights=None, settings={}, revision=None).revision == SPEC.revision
    assert changed(SPEC, weights=None, settings={}, revision="second").revision == "second"
