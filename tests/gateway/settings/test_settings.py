"""The settings file: checked as a whole, refused by key and line, applied at once."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.identity import Principal
from penstock.core.request import Tier
from penstock.gateway.settings import live as live_module
from penstock.gateway.settings.live import LiveSettings, SettingsFile
from penstock.gateway.settings.settings import (
    Settings,
    TierSettings,
    changed_settings,
    key_lines,
    nearest_line,
    parse_settings,
)
from tests.gateway.fake_engine import until

GOOD = """\
[limits.key]
requests_per_minute = 60

[limits.key.overrides.key_1]
requests_per_minute = 600

[prices.models."org/model.v1"]
input = 0.15
output = 0.6

[tiers]
best = "default"
workspaces = { ws_1 = "priority" }

[guards]
default_policy = "standard"

[guards.policies.standard]
rules = [
    { guard = "pii", action = "redact" },
    { guard = "blocklist", terms = ["x"] },
]

[response_cache]
ttl_s = 60
"""


def test_a_file_of_everything() -> None:
    settings = parse_settings(GOOD, "s.toml")
    assert settings.limits.key.overrides["key_1"].requests_per_minute == 600
    assert settings.prices.models["org/model.v1"].input == Decimal("0.15")
    urgent, other = (Principal(workspace_id=name, best_tier=Tier.PRIORITY) for name in ("ws_1", "other"))
    assert settings.tiers.granted(urgent, Tier.PRIORITY) is Tier.PRIORITY
    assert settings.tiers.granted(other, Tier.PRIORITY) is Tier.DEFAULT
    assert settings.guards.default_policy == "standard"
    assert settings.response_cache.ttl_s == 60.0


def test_an_empty_file_is_the_defaults() -> None:
    assert parse_settings("", "s.toml") == Settings()


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("[limts]\n", "s.toml, line 1: there is no setting 'limts'.", "Did you mean 'limits'?"),
        (
            "[limits.key]\n\nrequests_per_minut = 1\n",
            "s.toml, line 3: there is no setting 'limits.key.requests_per_minut'.",
            "Did you mean 'requests_per_minute'?",
        ),
        (
            GOOD.replace("600", '"many"'),
            "s.toml, line 5: limits.key.overrides.key_1.requests_per_minute is wrong: "
            "invalid enum value 'many'.",
            None,
        ),
        (
            GOOD.replace("0.6", "true"),
            "s.toml, line 9: prices.models.org/model.v1.output is wrong: expected `decimal | null`, got `bool`.",
            None,
        ),
        (
            GOOD.replace("output = 0.6", ""),
            "s.toml, line 7: prices.models.org/model.v1 needs both input and output, or an accelerator's cost.",
            None,
        ),
        (
            GOOD.replace('"redact"', '"redakt"'),
            "s.toml, line 19: guards.policies.standard.rules.0.action is wrong: invalid enum value 'redakt'.",
            None,
        ),
        (
            GOOD.replace('default_policy = "standard"', 'default_policy = "strict"'),
            "s.toml, line 16: The guards of default_policy name the policy 'strict', which does not exist.",
            "There are: none, standard.",
        ),
        (
            GOOD.replace('terms = ["x"]', 'patterns = ["(x"]'),
            "s.toml, line 21: The pattern '(x' cannot be used",
            None,
        ),
        (
            "[prices\n",
            "s.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1",
            None,
        ),
    ],
)
def test_a_bad_file_is_refused_by_key_and_line(text: str, sentence: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_settings(text, "s.toml")
    assert refusal.value.message.startswith(sentence)
    if hint:
        assert refusal.value.hint == hint


def test_changes_are_told_without_private_texts() -> None:
    before = parse_settings(GOOD, "s.toml")
    after = parse_settings(
        GOOD.replace("0.15", "0.2").replace('terms = ["x"]', 'terms = ["secret"]'),
        "s.toml",
    )
    changes = changed_settings(before, after)
    assert "prices.models.org/model.v1.input: 0.15 → 0.2" in changes
    assert "guards.policies.standard.rules changed" in changes
    assert "secret" not in " ".join(changes)
    assert len(changes) == 2


class TestLines:
    def test_keys_tables_and_arrays(self) -> None:
        text = '''# a comment
a.b = 1
"x y" = """
[not.a.table]
"""
[t."u.v"]
list = [
    1,
]
after = 2
[[rules]]
name = "one"
[[rules]]
name = "two"
'''
        lines = key_lines(text)
        assert lines["a", "b"] == 2
        assert lines["x y",] == 3
        assert lines["t", "u.v"] == 6
        assert lines["t", "u.v", "list"] == 7
        assert lines["t", "u.v", "after"] == 10
        assert lines["rules", 0, "name"] == 12
        assert lines["rules", 1, "name"] == 14
        assert not any("not" in path for path in lines)
        assert nearest_line(lines, ("rules", 1, "missing")) == 13
        assert nearest_line(lines, ("nowhere",)) is None


def opened(path: Path) -> tuple[LiveSettings, SettingsFile]:
    live = LiveSettings()
    file = SettingsFile(path, live)
    live.begin(*file.read())
    return live, file


class TestSettingsFile:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text("[response_cache]\nttl_s = 1\n")
        return path

    async def test_reload_applies_and_says_what_changed(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        live, source, seen = *opened(file), []
        live.attach(lambda settings: seen.append(settings.response_cache.ttl_s))
        file.write_text("[response_cache]\nttl_s = 2\n")
        assert await source.reload() == ["response_cache.ttl_s: 1.0 → 2.0"]
        assert seen == [1.0, 2.0]
        assert live.num_applied == 1
        assert "setting response_cache.ttl_s: 1.0 → 2.0" in caplog.messages

    async def test_a_bad_file_changes_nothing(self, file: Path) -> None:
        live, source, seen = *opened(file), []
        before = live.current
        live.attach(lambda settings: seen.append(settings))
        file.write_text("[response_cache]\nttl_s = 'x'\n")
        with pytest.raises(ConfigError, match="line 2"):
            await source.reload()
        assert live.current is before
        assert seen == [before]
        assert (live.num_applied, live.num_refused) == (0, 1)

    async def test_when_one_part_refuses_the_others_go_back(self, file: Path) -> None:
        live, source, seen = *opened(file), []

        def refuse(settings: Settings) -> None:
            if settings.response_cache.ttl_s == 2.0:
                raise ConfigError("no")

        live.attach(lambda settings: seen.append(settings.response_cache.ttl_s))
        live.attach(refuse)
        file.write_text("[response_cache]\nttl_s = 2\n")
        with pytest.raises(ConfigError):
            await source.reload()
        assert seen == [1.0, 2.0, 1.0]
        assert live.current.response_cache.ttl_s == 1.0

    async def test_a_changed_file_is_noticed_and_a_bad_one_is_tried_once(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live_module, "POLL_S", 0.001)
        live, source = opened(file)
        num_looks = 0

        def look(path: Path) -> Any:
            nonlocal num_looks
            num_looks += 1
            return stamp_of(path)

        stamp_of = live_module._stamp_of
        monkeypatch.setattr(live_module, "_stamp_of", look)
        watching = asyncio.create_task(source.watch())
        await until(lambda: num_looks >= 3)
        assert live.num_applied == 0
        file.write_text("nonsense")
        await until(lambda: live.num_refused)
        enough = num_looks + 3
        await until(lambda: num_looks >= enough)
        assert live.num_refused == 1
        file.unlink()
        enough = num_looks + 3
        await until(lambda: num_looks >= enough)
        assert live.num_refused == 1
        replacement = file.with_suffix(".new")
        replacement.write_text("[response_cache]\nttl_s = 3\n")
        os.replace(replacement, file)
        await until(lambda: live.num_applied)
        assert live.current.response_cache.ttl_s == 3.0
        watching.cancel()

    async def test_a_missing_file_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory\."):
            opened(tmp_path / "none.toml")


def test_tiers_default_to_what_keys_allow() -> None:
    for best in Tier:
        assert TierSettings().granted(Principal(best_tier=best), Tier.PRIORITY) is best


@pytest.mark.parametrize("page", ["settings.md", "usage.md", "objective.md"])
def test_the_documentations_examples_are_valid(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        assert parse_settings(example, page) != Settings()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[policies.default]\nmax_num_seqs = 1\n", "s.toml, line 1: policies.default cannot be described"),
        ('[policies.a]\ntier_shares = "8,3"\n', "s.toml, line 2: policies.a.tier_shares is wrong"),
        ("[policies.a]\nchunk = 8\n", "there is no setting 'policies.a.chunk'"),
        ("[policies.a.routing]\nrecompute_weight = 0.5\n", "policies.a.routing.recompute_weight is wrong"),
        ("[objective.weights]\nttft = -1\n", "objective.weights.ttft is wrong"),
        ("[objective.targets.batch]\nttft_s = 0\n", "objective.targets.batch.ttft_s is wrong"),
    ],
)
def test_wrong_objectives_and_policy_sets_are_refused_by_key_and_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_settings(text, "s.toml")
