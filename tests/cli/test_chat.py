from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from penstock.cli import chat as chat_module
from penstock.cli.chat import Conversation
from penstock.cli.clients import ChatClient
from penstock.cli.commands import penstock
from penstock.core.errors import PenstockError, UsageError


class FakeChat:
    """A chat server behind httpx's own transport seam: it answers with the question, word by word."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failure: Callable[[], httpx.Response] | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        if request.url.path == "/ready":
            return httpx.Response(200)
        if self.failure is not None:
            return self.failure()
        body = json.loads(request.content)
        self.bodies.append(body)
        words = body["messages"][-1]["content"].split(" ")
        deltas = [{"role": "assistant"}, *({"content": f"{word} "} for word in words)]
        events = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": []}]
        lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]
        return httpx.Response(200, text="\n\n".join(lines))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeChat:
    fake = FakeChat()
    build = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **options: build(transport=httpx.MockTransport(fake), **options)
    )
    return fake


def test_one_question(server: FakeChat) -> None:
    result = CliRunner().invoke(
        penstock,
        ["chat", "-m", "hello there", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0"],
    )
    assert (result.exit_code, result.stdout) == (0, "hello there \n")
    (body,) = server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello there"},
    ]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 9, 0)


def test_an_answer_gives_the_terminal_no_commands(server: FakeChat) -> None:
    result = CliRunner().invoke(penstock, ["chat", "-m", "\x1b]52;c;ZXZpbA==\x07a\tb\nc"])
    assert result.stdout == "\\x1b]52;c;ZXZpbA==\\x07a\tb\nc \n"


def test_a_conversation_remembers_resets_and_ends(server: FakeChat) -> None:
    typed = "one\n\ntwo\n/reset\nthree\n/what\n/exit\nnever\n"
    result = CliRunner().invoke(penstock, ["chat"], input=typed)
    assert result.exit_code == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["one", "one ", "two"], ["three"]]
    assert server.bodies[0]["temperature"] == 0.7  # the API's own default makes small models ramble
    assert "/reset forgets" in result.stderr


def test_a_failed_answer_does_not_end_the_conversation(server: FakeChat) -> None:
    server.failure = lambda: httpx.Response(503, json={"error": {"message": "The queue is full."}})
    result = CliRunner().invoke(penstock, ["chat"], input="one\n/exit\n")
    assert result.exit_code == 0
    assert "Error: The queue is full." in result.stderr


def test_a_failed_question_is_forgotten(server: FakeChat) -> None:
    conversation = Conversation(ChatClient("http://x"), "fake", None, {})
    server.failure = lambda: httpx.Response(500, text="oops")
    with pytest.raises(UsageError, match="status 500"):
        conversation.ask("one")
    assert conversation.messages == []


def test_a_stopped_answer_is_kept_as_far_as_it_came(
    server: FakeChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(ChatClient("http://x"), "fake", None, {})

    def stop_after_two(piece: object = "", **options: Any) -> None:
        print(piece, end="")
        if piece == "two ":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module.click, "echo", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("one two three")
    assert [message["content"] for message in conversation.messages] == ["one two three", "one two "]


def test_an_error_inside_a_stream_is_raised(server: FakeChat) -> None:
    server.failure = lambda: httpx.Response(
        200, text='data: {"error": {"message": "The engine stopped."}}\n\n'
    )
    with pytest.raises(PenstockError, match="The engine stopped"):
        list(ChatClient("http://x").answer("fake", []))


def test_a_missing_key_is_explained(server: FakeChat) -> None:
    server.failure = lambda: httpx.Response(401, json={"error": {"message": "No key."}})
    with pytest.raises(UsageError, match="No key") as caught:
        list(ChatClient("http://x").answer("fake", []))
    assert "--api-key" in (caught.value.hint or "")


def test_a_named_server_must_serve_the_named_model(server: FakeChat) -> None:
    result = CliRunner().invoke(penstock, ["chat", "other", "--url", "http://x", "-m", "hi"])
    assert result.exit_code == 1
    assert "does not serve other" in result.stderr


def test_a_named_server_that_is_not_there_is_a_sentence() -> None:
    result = CliRunner().invoke(penstock, ["chat", "--url", "http://127.0.0.1:9", "-m", "hi"])
    assert result.exit_code == 1
    assert "No server answers at http://127.0.0.1:9" in result.stderr


def test_something_else_on_the_port_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    build = httpx.Client
    page = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>hello</html>"))
    monkeypatch.setattr(httpx, "Client", lambda **options: build(transport=page, **options))
    with pytest.raises(UsageError, match="does not speak the OpenAI API"):
        ChatClient("http://x").served_models()


@pytest.mark.slow
def test_a_server_of_our_own_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "_DEFAULT_URL", "http://127.0.0.1:9")
    result = CliRunner().invoke(penstock, ["chat", "echo", "-m", "hello", "--max-tokens", "5"])
    assert (result.exit_code, result.stdout) == (0, "hello\n"), result.output
