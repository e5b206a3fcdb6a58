"""The playground in Chromium: at `/`, in the console, on a phone, with a keyboard, under the strict policy."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import PHONE, OpenPage, Serve
from tests.browser.demo import LARGE, SMALL

pytestmark = [pytest.mark.browser, pytest.mark.e2e]

Take = Callable[[Any, str], None]
DONE = ".answered:not(.live)"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def ask(page: Any, text: str) -> None:
    """Sends a message and waits for the whole answer of every pane."""
    page.wait_for_function("() => document.querySelector('.model-box').value")  # the models are known
    panes = page.locator(".pane").count()
    before = page.locator(DONE).count()
    page.fill(".entry", text)
    page.press(".entry", "Enter")
    page.wait_for_function(
        "([selector, count]) => document.querySelectorAll(selector).length >= count",
        arg=[DONE, before + panes],
    )


def test_a_chat_with_markdown_code_and_figures(open_page: OpenPage, serve: Serve, take_picture: Take) -> None:
    url, _ = serve()
    page = open_page(url)
    page.wait_for_selector(".welcome >> text=Nothing leaves this server.")
    take_picture(page, "playground-start")
    ask(page, "Write a Python function that returns the n-th prime number.")
    answer = page.locator(DONE).last
    assert answer.locator("strong").inner_text() == "found so far"
    assert answer.locator(".hl-keyword").first.inner_text() == "def"
    assert answer.locator("li").count() == 2
    assert "from cache" in answer.locator(".figures").inner_text()
    take_picture(page, "playground")
    page.emulate_media(color_scheme="dark")
    take_picture(page, "playground-dark")


def test_text_of_a_model_never_becomes_markup(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve()
    page = open_page(url)
    ask(page, "attack")
    answer = page.locator(DONE).last
    assert "<script>" in answer.inner_text()
    assert answer.locator("script, img, .answer-text a").count() == 0
    assert page.title() == "Penstock"


def test_edit_regenerate_and_choose(open_page: OpenPage, serve: Serve) -> None:
    url, served = serve()
    page = open_page(url)
    ask(page, "Why is the sky blue?")
    ask(page, "Make a table.")
    assert page.locator(".answered table tbody tr").count() == 3
    page.get_by_role("button", name="Regenerate").last.click()
    page.wait_for_selector(".variants:has-text('2/2')")
    page.get_by_role("button", name="The answer before").click()
    page.wait_for_selector(".variants:has-text('1/2')")
    first = page.locator(".asked").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    page.fill(".editor", "Write prime numbers.")
    page.press(".editor", "Control+Enter")
    page.wait_for_selector(f"{DONE} .hl-keyword")
    assert page.locator(".turn").count() == 2, "what came after the edited message is gone"
    assert len(served.engine.added) == 4


def test_escape_stops_an_answer_and_what_came_stays(open_page: OpenPage, serve: Serve) -> None:
    url, served = serve()
    page = open_page(url)
    page.wait_for_function("() => document.querySelector('.model-box').value")
    page.fill(".entry", "endless")
    page.press(".entry", "Enter")
    page.wait_for_selector(".live >> text=One moment")
    assert page.locator(".live").get_attribute("aria-busy") == "true"
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{DONE} >> text=stopped")
    assert "One moment" in page.locator(DONE).inner_text()
    page.wait_for_function("() => document.querySelector('.send').textContent === 'Send'")
    assert len(served.engine.aborted) == 1


def test_an_answer_that_is_left_stays_with_its_conversation(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve()
    page = open_page(url)
    page.wait_for_function("() => document.querySelector('.model-box').value")
    page.fill(".entry", "endless")
    page.press(".entry", "Enter")
    page.wait_for_selector(".live >> text=One moment")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Why is the sky blue?")
    assert page.locator(".turn").count() == 2
    page.locator(".history-open", has_text="endless").click()
    page.wait_for_selector(f"{DONE} >> text=stopped")
    assert "One moment" in page.locator(DONE).inner_text()


def test_conversations_are_kept_searched_exported_and_deleted(
    open_page: OpenPage, serve: Serve, tmp_path: Path
) -> None:
    url, _ = serve()
    page = open_page(url)
    ask(page, "Why is the sky blue?")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Make a table.")
    page.reload()
    rows = page.locator(".history-open")
    assert rows.all_inner_texts() == ["Make a table.", "Why is the sky blue?"]
    page.fill("input[type=search]", "scatters")
    assert rows.all_inner_texts() == ["Why is the sky blue?"]
    rows.first.click()
    page.wait_for_selector(f"{DONE} >> text=scatters")
    page.locator(".history-menu summary").first.click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["panes"][0]["messages"][0]["text"] == "Why is the sky blue?"
    page.fill("input[type=search]", "")
    page.set_input_files(".history-frame input[type=file]", path)
    page.wait_for_function("() => document.querySelectorAll('.history-open').length === 3")
    page.locator(".history-menu summary").first.click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("dialog .danger").click()
    page.wait_for_function("() => document.querySelectorAll('.history-open').length === 2")


def test_a_server_with_keys_asks_for_one_in_a_dialog(
    open_page: OpenPage, serve: Serve, take_picture: Take
) -> None:
    url, _ = serve("right")
    page = open_page(url)
    page.wait_for_selector("dialog.key-dialog")
    take_picture(page, "playground-key")
    page.fill("#asked-key", "wrong")
    page.press("#asked-key", "Enter")
    page.wait_for_function("() => document.querySelector('#asked-key')?.value === ''")
    page.fill("#asked-key", "right")
    page.press("#asked-key", "Enter")
    page.wait_for_function("() => document.querySelector('.model-box').value")
    ask(page, "Why is the sky blue?")
    assert "scatters" in page.locator(DONE).inner_text()
    assert page.evaluate("sessionStorage.getItem('penstock-key')") == "right"
    assert page.evaluate("JSON.stringify(localStorage)").find("right") < 0


def test_reasoning_is_folded_above_the_answer(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve()
    page = open_page(url)
    page.get_by_label("System prompt").fill("Think first.")
    ask(page, "Why is the sky blue?")
    fold = page.locator(".reasoning")
    assert fold.get_attribute("open") is None
    assert page.locator(f"{DONE} .answer-text").inner_text().startswith("The sky is blue")
    fold.locator("summary").click()
    assert "one sentence is enough" in fold.inner_text()


def test_tools_are_called_and_the_user_types_their_results(
    open_page: OpenPage, serve: Serve, take_picture: Take
) -> None:
    url, _ = serve()
    page = open_page(url)
    page.click("summary:has-text('Tools')")
    page.click("text=Add a tool")
    page.get_by_label("Name").fill("get weather")
    page.wait_for_selector(".tool-card .problem:visible")
    page.get_by_label("Name").fill("get_weather")
    ask(page, "How is the weather in Lisbon?")
    assert '"city": "Lisbon"' in page.inner_text(".call")
    page.get_by_label("Result of get_weather").fill('{"celsius": 21, "sky": "clear"}')
    page.click("text=Send result")
    page.wait_for_selector(f"{DONE} strong >> text=21 °C")
    take_picture(page, "playground-tools")


def test_structured_output(open_page: OpenPage, serve: Serve) -> None:
    url, served = serve()
    page = open_page(url)
    page.click("summary:has-text('Structured output')")
    page.get_by_label("The answer is").select_option("json_schema")
    page.get_by_label("JSON schema").fill("{")
    page.wait_for_selector("text=This is not JSON yet")
    page.fill(".entry", "Give me JSON.")
    page.press(".entry", "Enter")
    page.wait_for_selector(".composer .problem >> text=The schema is not a JSON object")
    assert page.input_value(".entry") == "Give me JSON."
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    ask(page, "Give me JSON.")
    assert page.locator(f"{DONE} .hl-name").first.inner_text() == '"name"'
    assert served.engine.added[-1].sampling.grammar is not None


def test_token_probabilities_are_coloured_and_read_with_arrows(
    open_page: OpenPage, serve: Serve, take_picture: Take
) -> None:
    url, _ = serve()
    page = open_page(url)
    page.check("text=Show token probabilities")
    ask(page, "Explain continuous batching.")
    tokens = page.locator(".tokens .token")
    assert tokens.count() > 10
    assert len(set(tokens.evaluate_all("all => all.map((each) => each.className)"))) > 3
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".alternatives:visible")
    assert page.locator(".alternative").count() == 5
    assert re.search(r"\d %", page.locator(".token:focus").get_attribute("aria-label"))
    tokens.nth(12).hover()
    take_picture(page, "playground-probabilities")
    page.get_by_role("button", name="Probabilities").click()
    assert page.locator(".tokens").count() == 0


def test_two_models_side_by_side(open_page: OpenPage, serve: Serve, take_picture: Take) -> None:
    url, served = serve()
    page = open_page(url)
    page.click("text=Compare")
    ask(page, "Explain continuous batching.")
    assert {request.model for request in served.engine.added} == {SMALL, LARGE}
    names = page.locator(".pane-name").all_inner_texts()
    assert names == [SMALL, LARGE]
    assert page.locator(".pane").nth(1).locator("ol li").count() == 2
    take_picture(page, "playground-compare")
    page.reload()
    page.locator(".history-open").first.click()
    assert page.locator(".pane").count() == 2


def test_completions(open_page: OpenPage, serve: Serve) -> None:
    url, served = serve()
    page = open_page(url)
    page.get_by_role("radio", name="Completion").check(force=True)
    assert page.locator(".send").inner_text() == "Complete"
    ask(page, "The sky")
    assert "scatters" in page.locator(DONE).inner_text()
    page.get_by_role("button", name="Continue").click()
    assert page.input_value(".entry").startswith("The skyThe sky is blue")
    assert len(served.engine.added) == 1


def test_parameters_are_sent_and_answers_are_copied(open_page: OpenPage, serve: Serve) -> None:
    url, served = serve()
    page = open_page(url, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.4")
    for label, value in (("Top p", "0.5"), ("Max tokens", "40"), ("Seed", "7"), ("Stop strings", "NEVER")):
        page.get_by_label(label).fill(value)
    ask(page, "Write a Python function that returns the n-th prime number.")
    sampling = served.engine.added[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.4, 0.5, 40, 7)
    answer = page.locator(DONE).last
    answer.get_by_title("Copy this answer").click()
    page.wait_for_selector("button >> text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith(
        answer.locator("p").first.inner_text()[:9]
    )


def test_code_of_the_same_call(open_page: OpenPage, serve: Serve, take_picture: Take) -> None:
    url, _ = serve()
    page = open_page(url)
    page.fill(".entry", "Why is the sky blue?")
    page.click("text=Code")
    assert f"curl {url}/v1/chat/completions" in page.inner_text(".tab-panel")
    page.keyboard.press("Tab")
    page.locator("[role=tab]").first.focus()
    page.keyboard.press("ArrowRight")
    assert "from openai import OpenAI" in page.inner_text(".tab-panel")
    take_picture(page, "playground-code")
    page.check("text=Stream the answer")
    assert "stream=True" in page.inner_text(".tab-panel")
    page.keyboard.press("Escape")
    assert page.locator("dialog").count() == 0


def test_images_go_to_models_that_take_them_alone(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve()
    page = open_page("about:blank")
    sent: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        chunk = {"choices": [{"delta": {"content": "A dot."}, "finish_reason": "stop"}]}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    models = [
        {"id": "sees", "owned_by": "penstock", "input_modalities": ["text", "image"]},
        {"id": "reads", "owned_by": "x"},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.route("**/v1/chat/completions", answer)
    page.goto(url)
    page.wait_for_selector(".attach:visible")
    assert "Nothing leaves" not in page.inner_text(".welcome")
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
    page.set_input_files(".composer input[type=file]", picture)
    page.wait_for_selector(".pictures img")
    ask(page, "What is this?")
    image, text = sent[0]["messages"][0]["content"]
    assert image["image_url"]["url"].endswith(PIXEL)
    assert text == {"type": "text", "text": "What is this?"}
    page.wait_for_function("() => document.querySelector('.bubble img').naturalWidth === 1")
    page.select_option(".model-box >> nth=0", "reads")
    assert not page.locator(".attach").is_visible()


def test_on_a_phone(open_page: OpenPage, serve: Serve, take_picture: Take) -> None:
    url, _ = serve()
    page = open_page(url, viewport=PHONE, has_touch=True, is_mobile=True)
    assert not page.locator(".pg-settings").is_visible()
    ask(page, "Write a Python function that returns the n-th prime number.")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing scrolls sideways"
    take_picture(page, "playground-phone")
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").is_visible()
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Chats").click()
    page.locator(".history-open").first.click()
    assert not page.locator(".pg-side").is_visible()


def test_what_a_screen_reader_is_told(open_page: OpenPage, serve: Serve) -> None:
    url, _ = serve()
    page = open_page(url)
    page.evaluate("""() => {
        window.heard = [];
        new MutationObserver(() => heard.push(document.getElementById('news').textContent))
            .observe(document.getElementById('news'), {childList: true});
    }""")
    ask(page, "Explain continuous batching.")
    heard = page.evaluate("heard")
    assert heard[0] == f"{SMALL} is answering."
    assert heard[-1].endswith("End of the answer.")
    assert len(heard) < 8, "sentences, not tokens"
    assert "No request waits for others." in " ".join(heard)
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, input, select, textarea')]
        .filter((each) => each.checkVisibility() && !each.textContent.trim() && !each.labels?.length
            && !each.getAttribute('aria-label')).map((each) => each.outerHTML)""")
    assert unnamed == []


def test_the_playground_in_the_console(open_page: OpenPage, serve: Serve, take_picture: Take) -> None:
    url, _ = serve("right")
    page = open_page(f"{url}/console#/playground")
    page.fill("#asked-key", "right")
    page.press("#asked-key", "Enter")
    page.wait_for_function("() => document.querySelector('.model-box')?.value")
    ask(page, "Make a table of sorting algorithms.")
    assert page.locator(".md-table").count() == 1
    take_picture(page, "playground-console")
    page.evaluate("location.hash = '#/overview'")
    page.wait_for_function("() => !document.querySelector('.pg')")
    assert page.locator("main.playground-page").count() == 0
