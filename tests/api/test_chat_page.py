"""The chat page, run in Node: what it promises, and how it shows a model that reasons."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "penstock" / "api" / "static" / "chat.html"
HARNESS = Path(__file__).with_name("page_harness.js")

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")


def seen(
    owners: list[str], deltas: list[dict[str, str]], pasted: str = "", modalities: list[str] | None = None
) -> dict[str, Any]:
    more = {} if modalities is None else {"input_modalities": modalities}
    models = {"data": [{"id": f"model-{owner}", "owned_by": owner, **more} for owner in owners]}
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
    done = subprocess.run(
        ["node", str(HARNESS), str(PAGE), json.dumps(models), "".join(lines), pasted],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_reasoning_is_folded_above_the_answer() -> None:
    page = seen(
        ["penstock"], [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "Hi"}]
    )
    assert (page["reasoning"], page["answer"]) == ("Let me think.", "Hi")


def test_reasoning_as_other_servers_name_it() -> None:
    assert seen(["external"], [{"reasoning": "Hm."}, {"content": "Hi"}])["reasoning"] == "Hm."


def test_a_model_that_does_not_reason_has_nothing_to_unfold() -> None:
    page = seen(["penstock"], [{"content": "Hi"}])
    assert (page["reasoning"], page["answer"]) == (None, "Hi")


def test_the_page_promises_privacy_only_where_no_external_server_answers() -> None:
    assert "Nothing leaves this server." in seen(["penstock", "penstock"], [])["welcome"]
    assert seen(["penstock", "external"], [])["welcome"] == "Ask anything."


def test_a_pasted_image_is_sent_to_a_model_that_sees_and_to_no_other() -> None:
    url = "data:image/png;base64,aGk="
    (asked,) = seen(["penstock"], [{"content": "Hi"}], url, ["text", "image"])["asked"][:1]
    assert asked["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Hello?"},
    ]
    assert seen(["penstock"], [{"content": "Hi"}], url)["asked"][0]["content"] == "Hello?"
