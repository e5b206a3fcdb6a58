"""Pages of other sites in Chromium, which asks the server before it lets a page call the API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.core.gateway_config import ServerConfig
from tests.api.bounded_server import bounded_server
from tests.browser.demo import DemoEngine

pytestmark = pytest.mark.browser

KEY = "key-of-a-page"
CALL = """async ([url, key, stream]) => {
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json", "x-stainless-lang": "js" },
    body: JSON.stringify({ stream, max_tokens: 20, messages: [{ role: "user", content: "Hello" }] }),
  });
  return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
}"""
SOCKET = """([url, key]) => new Promise((resolve) => {
  const protocols = ["realtime", `openai-insecure-api-key.${key}`];
  const socket = new WebSocket(url.replace("http", "ws") + "/v1/stream", protocols);
  socket.onopen = () => { resolve("open"); socket.close(); };
  socket.onerror = () => resolve("refused");
})"""


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>A site</title>")

    def log_message(self, *_: Any) -> None:
        """Pages are not logged."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(chromium: Any, site: str) -> Iterator[Any]:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(site)
    yield page
    context.close()


def test_a_page_whose_origin_is_allowed_calls_the_api(page: Any, site: str) -> None:
    config = ServerConfig(api_key=KEY, allowed_origins=(site,))
    with bounded_server(DemoEngine(), config) as served:
        status, request_id, text = page.evaluate(CALL, [served.url, KEY, False])
        assert (status, bool(request_id)) == (200, True)
        assert '"choices"' in text
        status, _, events = page.evaluate(CALL, [served.url, KEY, True])
        assert status == 200
        assert events.endswith("data: [DONE]\n\n")
        assert page.evaluate(SOCKET, [served.url, KEY]) == "open"
        status, _, text = page.evaluate(CALL, [served.url, "wrong", False])
        assert status == 401, "pages can read refusals"
        assert "invalid_api_key" in text


def test_a_page_of_any_other_site_is_refused(page: Any) -> None:
    config = ServerConfig(api_key=KEY, allowed_origins=("https://app.example",))
    with bounded_server(DemoEngine(), config) as served:
        with pytest.raises(Exception, match="Failed to fetch"):
            page.evaluate(CALL, [served.url, KEY, False])
        assert page.evaluate(SOCKET, [served.url, "wrong"]) == "refused"


# What a page can send without asking first, each to its end.
FORGERIES = """async ([url, text]) => {
  const body = JSON.stringify({ max_tokens: 2, messages: [{ role: "user", content: text }] });
  const chat = `${url}/v1/chat/completions`;
  const over = (node) => new Promise((resolve) => {
    node.onload = node.onerror = resolve;
    document.body.append(node);
  });
  const make = (tag, fields) => Object.assign(document.createElement(tag), fields);
  navigator.sendBeacon(chat, body);
  for (const mode of ["cors", "no-cors"]) {
    const options = { method: "POST", mode, body, credentials: "include", headers: { "content-type": "text/plain" } };
    await fetch(chat, options).catch(() => null);
  }
  const target = make("iframe", { name: "target" });
  await over(target);
  const form = make("form", { method: "post", enctype: "text/plain", target: "target", action: chat });
  form.append(make("input", { name: body.slice(0, -1) + ',"a":"', value: '"}' }));
  document.body.append(form);
  const answered = new Promise((resolve) => { target.onload = resolve; });
  form.submit();
  await answered;
  await over(make("iframe", { src: `${url}/` }));
}"""


def test_a_foreign_page_makes_a_server_without_keys_do_nothing(page: Any) -> None:
    with bounded_server(DemoEngine()) as served:
        page.evaluate(FORGERIES, [served.url, "forged"])
        assert page.frames[-1].url.startswith("chrome-error:"), "the chat page is in no frame"
        assert page.evaluate(SOCKET, [served.url, "none"]) == "refused"
        assert served.engine.added == []
