"""Files of text in chats, by the real SDKs: uploaded, or inside the request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.core.shares import Holding, Shares
from penstock.gateway import documents
from tests.api.scripted import prompt_of, scripted
from tests.api.stored_work import ServedWork, serving_work

TEXT = "Zürich has 434,000 inhabitants."
READ = f"<document>\n<title>town.txt</title>\n{TEXT}\n</document>"
ASKED = "How many?"
DATA_URL = f"data:text/plain;base64,{base64.b64encode(TEXT.encode()).decode()}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedWork]:
    """The model repeats its prompt."""
    with serving_work(scripted(prompt_of), tmp_path) as served:
        yield served


def upload(sdk: openai.OpenAI, data: bytes = TEXT.encode(), name: str = "town.txt") -> str:
    return sdk.files.create(file=(name, data), purpose="user_data").id


def chat(sdk: openai.OpenAI, *files: dict[str, Any], role: str = "user") -> str:
    parts = [{"type": "file", "file": file} for file in files]
    messages: Any = [{"role": role, "content": [*parts, {"type": "text", "text": ASKED}]}]
    answer = sdk.chat.completions.create(model="bytes", messages=messages)
    return answer.choices[0].message.content or ""


def respond(sdk: openai.OpenAI, **file: Any) -> Any:
    content = [{"type": "input_file", **file}, {"type": "input_text", "text": ASKED}]
    items: Any = [{"role": "user", "content": content}]
    return sdk.responses.create(model="bytes", input=items)


def tell(sdk: anthropic.Anthropic, file_id: str, **fields: Any) -> str:
    block = {"type": "document", "source": {"type": "file", "file_id": file_id}, **fields}
    messages: Any = [{"role": "user", "content": [block, {"type": "text", "text": ASKED}]}]
    answer = sdk.beta.messages.create(
        model="bytes", max_tokens=500, messages=messages, betas=["files-api-2025-04-14"]
    )
    return "".join(part.text for part in answer.content if part.type == "text")


def test_chat(served: ServedWork) -> None:
    sdk = served.openai()
    assert READ in chat(sdk, {"file_id": upload(sdk)})
    assert READ in chat(sdk, {"file_data": DATA_URL, "filename": "town.txt"})
    assert TEXT in chat(sdk, {"file_data": DATA_URL.partition(",")[2]})
    twice = upload(sdk)
    assert chat(sdk, {"file_id": twice}, {"file_id": twice}).count(READ) == 2


def test_responses_read_the_file_again_in_the_next_turn(served: ServedWork) -> None:
    sdk = served.openai()
    file_id = upload(sdk, b"\xef\xbb\xbf" + TEXT.encode())
    first = respond(sdk, file_id=file_id)
    assert READ in first.output_text
    assert READ in respond(sdk, file_data=DATA_URL, filename="town.txt").output_text
    later = sdk.responses.create(model="bytes", input="And now?", previous_response_id=first.id)
    assert later.output_text.count(READ) >= 1
    items: Any = [{"role": "user", "content": [{"type": "input_file", "file_id": file_id}]}]
    counted = sdk.responses.input_tokens.count(model="bytes", input=items)
    assert counted.input_tokens > len(READ)
    sdk.files.delete(file_id)
    with pytest.raises(openai.NotFoundError, match="There is no file"):
        sdk.responses.create(model="bytes", input="And now?", previous_response_id=first.id)


def test_anthropic(served: ServedWork) -> None:
    sdk = served.anthropic()
    file_id = sdk.beta.files.upload(file=("town.txt", TEXT.encode(), "text/plain")).id
    assert READ in tell(sdk, file_id)
    assert "<title>Towns</title>\n<context>Trust it.</context>\nZ" in tell(
        sdk, file_id, title="Towns", context="Trust it.", cache_control={"type": "ephemeral"}
    )
    result = {"type": "document", "source": {"type": "file", "file_id": file_id}}
    messages: Any = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [result]}]},
    ]
    tools: Any = [{"name": "read", "input_schema": {"type": "object", "properties": {}}}]
    counted = sdk.beta.messages.count_tokens(model="bytes", messages=messages, tools=tools)
    assert counted.input_tokens > len(READ)


def test_other_workspaces_cannot_read_the_file(served: ServedWork) -> None:
    file_id = upload(served.openai("w1"))
    with pytest.raises(openai.NotFoundError, match="There is no file"):
        chat(served.openai("w2"), {"file_id": file_id})
    with pytest.raises(anthropic.NotFoundError, match="There is no file"):
        tell(served.anthropic("w2"), file_id)


def test_what_is_no_text_is_refused(served: ServedWork) -> None:
    sdk = served.openai()
    for data, why in ((b"%PDF-1.7 \xff", "PDF"), (b"\x89PNG\0", "not text in UTF-8"), (b"a\0b", "not text")):
        encoded = base64.b64encode(data).decode()
        with pytest.raises(openai.BadRequestError, match=why) as refused:
            chat(sdk, {"file_data": encoded})
        assert refused.value.param == "messages[0].content"
        with pytest.raises(openai.BadRequestError, match=why):
            chat(sdk, {"file_id": upload(sdk, data)})
    for file, why in (
        ({"file_data": "data:text/plain;base64,???"}, "damaged"),
        ({"file_data": "QQ==" * documents._SLICE_CHARS}, "damaged"),
        ({"file_data": base64.b64encode(b"a" * documents._SLICE_CHARS + b"\xc3").decode()}, "not text"),
        ({"filename": "a.txt"}, "neither file_data nor file_id"),
        ({"file_id": "../../etc/passwd"}, "There is no file"),
    ):
        with pytest.raises(openai.APIStatusError, match=why):
            chat(sdk, file)
    with pytest.raises(openai.BadRequestError, match="only messages of users and tools"):
        chat(sdk, {"file_data": DATA_URL}, role="system")
    with pytest.raises(openai.BadRequestError, match="not fetched by URL"):
        respond(sdk, file_url="http://127.0.0.1/a.txt")


def test_the_files_of_a_request_are_bounded(served: ServedWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 2 * len(TEXT.encode()))
    sdk = served.openai()
    file = {"file_id": upload(sdk)}
    chat(sdk, file, file)
    with pytest.raises(openai.BadRequestError, match="bytes together"):
        chat(sdk, file, file, file)
    monkeypatch.undo()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(sdk, {"file_id": upload(sdk, b"x" * 10_000)})


def test_small_requests_hold_no_more_bytes_of_files_than_their_share(
    served: ServedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the files that they name until their answers end."""
    shares = Shares(4000)
    monkeypatch.setattr(served.gateway, "_file_bytes", shares)
    sdk = served.openai()
    file_id = upload(sdk, b"x" * 900)
    before = Holding(shares, "w1", "")
    before.take(2000)
    chat(sdk, {"file_id": file_id})
    assert shares.used == 2000
    before.take(500)
    with pytest.raises(openai.RateLimitError, match="bytes of files"):
        chat(sdk, {"file_id": file_id})
    assert shares.used == 2500
    chat(served.openai("w2"), {"file_id": upload(served.openai("w2"))})
