"""Names and the models behind them: several models, aliases, adapters, allow lists, regions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.clock import VirtualClock
from penstock.core.errors import (
    ConfigError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PermissionDenied,
)
from penstock.core.gateway_config import GatewayConfig, NamesConfig
from penstock.core.identity import OPEN_PRINCIPAL, Principal
from penstock.core.request import Adapter
from penstock.gateway.gateway import Gateway
from penstock.gateway.models.catalogue import (
    FILE_NAME,
    KIND,
    AdapterRegistry,
    RegisteredAdapter,
    open_adapters,
    register,
    try_adapter,
    try_given,
)
from penstock.gateway.models.settings import ModelAccess, ModelSettings
from penstock.gateway.prompts import GenerationRequest, SamplingOptions, TextPrompt
from penstock.gateway.store.database import Database, sqlite_url
from penstock.gateway.store.versions import append
from tests.gateway.fake_engine import FakeEngine, engine_ready, model_card, script_text
from tests.gateway.store.ready_made import ready_made_database

SQL = RegisteredAdapter(Adapter("sql", "/adapters/sql", "d1"))
LEGAL = RegisteredAdapter(Adapter("legal", "/adapters/legal", "d2"), base_model="large")


def gateway_with(
    *names: str, aliases: dict[str, str] | None = None, settings: ModelSettings | None = None, **engine: Any
) -> tuple[Gateway, FakeEngine]:
    """Serves models of these names; the first is that of requests without one."""
    readies = [engine_ready(model_card(name=name, max_model_len=256 + n)) for n, name in enumerate(names)]
    readies = [msgspec.structs.replace(ready, max_lora_rank=16) for ready in readies]
    fake = FakeEngine(script_text("yes"), ready=readies[0])
    fake.more = readies[1:]
    config = GatewayConfig(names=NamesConfig(first=names[0], aliases=aliases or {}))
    gateway = Gateway(fake, config, VirtualClock())
    gateway.catalogue.apply(settings or ModelSettings())
    return gateway, fake


def request_for(
    model: str | None = None, principal: Principal = OPEN_PRINCIPAL, **more: Any
) -> GenerationRequest:
    options = SamplingOptions(max_tokens=8)
    return GenerationRequest(
        prompts=(TextPrompt("hi"),), sampling=options, model=model, principal=principal, **more
    )


def someone(**fields: Any) -> Principal:
    return Principal(key_id="key_1", workspace_id="ws_1", **fields)


class TestSeveralModels:
    async def test_each_has_its_own_limits_and_engines(self) -> None:
        gateway, engine = gateway_with("small", "large")
        for name, expected in ((None, "small"), ("small", "small"), ("large", "large")):
            answer = await gateway.submit(request_for(name))
            assert answer.model == engine.added[-1].model == expected
        assert gateway.model("large").card.max_model_len == 257
        with pytest.raises(ModelNotFound, match="'other' is not served here"):
            await gateway.submit(request_for("other"))

    async def test_metrics_tell_models_apart(self) -> None:
        gateway, _ = gateway_with("small", "large")
        await (await gateway.submit(request_for("large"))).collect()
        page = gateway.render_own_metrics().decode()
        assert 'vllm:generation_tokens_total{model_name="large"} 4.0' in page
        assert 'vllm:num_requests_running{model_name="small"}' in page
        assert 'vllm:num_requests_running{model_name="large"}' in page

    async def test_a_restarted_engine_with_the_same_model_keeps_its_tokenizer(self) -> None:
        gateway, engine = gateway_with("small")
        served = gateway.model()
        engine.ready = msgspec.structs.replace(engine.ready, num_kv_blocks=3)
        assert gateway.model() is served
        assert gateway.model().engine is engine.ready
        engine.ready = engine_ready(model_card(name="small", max_model_len=99))
        assert gateway.model().card.max_model_len == 99

    async def test_nobody_is_there(self) -> None:
        gateway, engine = gateway_with("small")
        engine.ready = None
        with pytest.raises(EngineUnavailable):
            gateway.model("small")


class TestAliases:
    async def test_an_alias_is_answered_by_its_model(self) -> None:
        gateway, _ = gateway_with("small", "large", aliases={"gpt-4o": "large"})
        assert (await gateway.submit(request_for("gpt-4o"))).model == "large"

    async def test_settings_go_before_what_was_given_at_the_start(self) -> None:
        settings = ModelSettings(aliases={"gpt-4o": "small"})
        gateway, _ = gateway_with("small", "large", aliases={"gpt-4o": "large"}, settings=settings)
        assert gateway.model("gpt-4o").card.name == "small"

    async def test_a_model_is_never_hidden_by_an_alias(self) -> None:
        gateway, _ = gateway_with("small", "large", settings=ModelSettings(aliases={"small": "large"}))
        assert gateway.model("small").card.name == "small"

    def test_an_alias_of_an_alias_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="an alias itself"):
            ModelSettings(aliases={"a": "b", "b": "small"}).check()


class TestAllowLists:
    async def test_a_key_may_use_a_model_by_its_name_or_by_an_alias_allowed_to_it(self) -> None:
        gateway, _ = gateway_with("small", "large", aliases={"fast": "small", "slow": "large"})
        principal = someone(allowed_models=frozenset({"fast"}))
        assert (await gateway.submit(request_for("fast", principal))).model == "small"
        for name in ("small", "large", "slow", None):
            with pytest.raises(PermissionDenied, match="may not use the model"):
                await gateway.submit(request_for(name, principal))
        assert [entry.name for entry in gateway.catalogue.listed(principal)] == ["fast"]

    async def test_a_workspace_bounds_its_keys(self) -> None:
        settings = ModelSettings(workspaces={"ws_1": ModelAccess(allowed=("small",))})
        gateway, _ = gateway_with("small", "large", settings=settings)
        await gateway.submit(request_for("small", someone()))
        with pytest.raises(PermissionDenied):
            await gateway.submit(request_for("large", someone(allowed_models=frozenset({"large"}))))
        await gateway.submit(request_for("large", Principal(workspace_id="ws_2")))
        assert [entry.name for entry in gateway.catalogue.listed(someone())] == ["small"]

    async def test_what_the_operator_chose_is_not_asked_of_the_caller(self) -> None:
        settings = ModelSettings(workspaces={"ws_1": ModelAccess(allowed=("small",))})
        gateway, _ = gateway_with("small", "large", settings=settings)
        assert (await gateway.submit(request_for("large", someone(), model_is_given=True))).model == "large"


class TestRegions:
    async def test_of_the_request_then_the_key_then_the_workspace(self) -> None:
        settings = ModelSettings(
            workspaces={"ws_1": ModelAccess(region="eu")}, keys={"key_2": ModelAccess(region="us")}
        )
        gateway, engine = gateway_with("small", settings=settings)
        await gateway.submit(request_for(principal=someone()))
        await gateway.submit(request_for(principal=Principal(key_id="key_2", workspace_id="ws_1")))
        await gateway.submit(request_for(principal=someone(), region="asia"))
        await gateway.submit(request_for())
        assert [request.region for request in engine.added] == ["eu", "us", "asia", ""]


class TestAdapters:
    async def test_an_adapter_is_a_model_of_its_own(self) -> None:
        gateway, engine = gateway_with("small", "large", settings=ModelSettings(aliases={"law": "legal"}))
        gateway.catalogue.adapters = AdapterRegistry([SQL, LEGAL])
        for name, base, adapter in (
            ("sql", "small", SQL),
            ("legal", "large", LEGAL),
            ("law", "large", LEGAL),
        ):
            answer = await gateway.submit(request_for(name))
            assert answer.model == adapter.adapter.name
            assert (engine.added[-1].model, engine.added[-1].adapter) == (base, adapter.adapter)
        assert gateway.model("legal").tokenizer is gateway.model("large").tokenizer
        assert gateway.model("legal").fingerprint != gateway.model("large").fingerprint
        listed = [(entry.name, entry.parent) for entry in gateway.catalogue.listed(OPEN_PRINCIPAL)]
        assert listed == [
            ("small", None),
            ("large", None),
            ("sql", "small"),
            ("legal", "large"),
            ("law", None),
        ]

    async def test_other_weights_under_the_same_name_are_another_adapter(self) -> None:
        gateway, engine = gateway_with("small")
        await gateway.catalogue.adapters.add(SQL)
        await gateway.submit(request_for("sql"))
        newer = RegisteredAdapter(Adapter("sql", "/adapters/sql", "d9"))
        await gateway.catalogue.adapters.add(newer)
        await gateway.submit(request_for("sql"))
        first, second = (request.prefix_salt for request in engine.added)
        assert first != second

    async def test_one_whose_base_model_is_not_served(self) -> None:
        gateway, _ = gateway_with("small")
        gateway.catalogue.adapters = AdapterRegistry([LEGAL])
        with pytest.raises(ModelNotFound, match="'legal' is for 'large'"):
            gateway.model("legal")
        assert [entry.name for entry in gateway.catalogue.listed(OPEN_PRINCIPAL)] == ["small"]

    async def test_a_key_must_be_allowed_the_adapter_itself(self) -> None:
        gateway, _ = gateway_with("small")
        gateway.catalogue.adapters = AdapterRegistry([SQL])
        with pytest.raises(PermissionDenied):
            await gateway.submit(request_for("sql", someone(allowed_models=frozenset({"small"}))))

    async def test_a_trial_asks_an_engine(self) -> None:
        gateway, engine = gateway_with("small")
        await try_adapter(engine, gateway.catalogue, SQL)
        assert engine.added[-1].adapter == SQL.adapter
        assert engine.added[-1].sampling.max_tokens == 1
        engine.script = lambda request: [InvalidRequest("It was made for another model.")]
        with pytest.raises(InvalidRequest, match="made for another model"):
            await try_adapter(engine, gateway.catalogue, SQL)
        engine.ready = engine_ready(model_card(name="small"))
        with pytest.raises(InvalidRequest, match="takes no LoRA adapters"):
            await try_adapter(engine, gateway.catalogue, SQL)

    def test_names_that_are_taken(self) -> None:
        gateway, _ = gateway_with("small", aliases={"fast": "small"})
        for name in ("small", "fast", "auto"):
            entry = RegisteredAdapter(Adapter(name, "/x", "d"))
            with pytest.raises(Conflict, match="is taken"):
                gateway.catalogue.check_free(entry)


def write_adapter(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


class TestRegistry:
    async def test_gateways_share_a_database_and_so_do_lives(self, tmp_path: Path) -> None:
        ready_made_database(tmp_path).close()
        ours, theirs = (AdapterRegistry(database=Database(sqlite_url(tmp_path))) for _ in range(2))
        await ours.add(SQL)
        assert await theirs.load() == 1
        assert theirs.find("sql") == SQL
        await theirs.add(LEGAL)
        await ours.add(SQL)  # it does not know of the other change
        assert ours.all() == [SQL, LEGAL]
        assert await ours.remove("sql") == SQL
        assert await theirs.load() == 4
        assert theirs.all() == [LEGAL]

    async def test_a_file_of_an_earlier_release_is_brought_in_once(self, tmp_path: Path) -> None:
        database = ready_made_database(tmp_path)
        (tmp_path / FILE_NAME).write_bytes(msgspec.json.encode([SQL]))
        first = await open_adapters(NamesConfig(), tmp_path, database)
        assert first.all() == [SQL]
        await first.remove("sql")
        assert (await open_adapters(NamesConfig(), tmp_path, database)).all() == []
        database.close()

    async def test_a_damaged_file_of_an_earlier_release(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / FILE_NAME).write_text("[{")
        database = Database(sqlite_url(tmp_path / "data"))
        assert (await open_adapters(NamesConfig(), tmp_path, database)).all() == []
        assert "are not used" in caplog.text
        assert not (tmp_path / "data").exists(), "nothing is stored before there is something to store"

    async def test_what_was_given_at_the_start_stays(self, tmp_path: Path) -> None:
        registry = AdapterRegistry([SQL], ready_made_database(tmp_path))
        with pytest.raises(Conflict, match="given when the server started"):
            await registry.remove("sql")
        with pytest.raises(Conflict, match="given when the server started"):
            await registry.add(SQL)
        with pytest.raises(NotFound, match="no adapter 'other'"):
            await registry.remove("other")

    async def test_the_digest_is_of_the_weights_and_not_of_the_place(self, tmp_path: Path) -> None:
        first = await register("a", write_adapter(tmp_path / "a"))
        moved = await register("b", write_adapter(tmp_path / "b"))
        other = await register("a", write_adapter(tmp_path / "a", b"other weights"))
        assert first.adapter.digest == moved.adapter.digest != other.adapter.digest

    async def test_what_is_no_adapter(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="is no LoRA adapter"):
            await register("a", str(tmp_path))
        with pytest.raises(InvalidRequest, match="all of them printable"):
            await register("a\nb", write_adapter(tmp_path / "a"))
        with pytest.raises(ConfigError, match="is no LoRA adapter"):
            await open_adapters(
                NamesConfig(adapters=(("a", "/nowhere", None),)), tmp_path, Database("sqlite://")
            )


async def test_adapters_of_the_command_line_are_tried_before_the_first_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, engine = gateway_with("small")
    gateway.catalogue.adapters = AdapterRegistry([SQL, LEGAL])
    await try_given(engine, gateway.catalogue)
    assert [request.adapter for request in engine.added] == [SQL.adapter]
    assert "the adapter legal cannot be used" in caplog.text


async def test_a_damaged_version_leaves_the_adapters_as_they_were(tmp_path: Path) -> None:
    database = ready_made_database(tmp_path)
    registry = AdapterRegistry(database=database)
    await registry.add(SQL)
    await database.run(lambda connection: append(connection, KIND, b"[{", expected=1, actor="test"))
    assert await registry.load() == 2
    assert registry.find("sql") == SQL
    database.close()
