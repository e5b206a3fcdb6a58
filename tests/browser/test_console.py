"""The console in Chromium, with a real server of two echoing replicas: every page, sign-in, a phone, the keyboard."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import PHONE, OpenPage
from tests.e2e.conftest import start_server

pytestmark = [pytest.mark.browser, pytest.mark.e2e]

Take = Callable[[Any, str], None]
KEY = "key-for-the-console"
PRICES = '[prices.models."echo"]\ninput = 150\noutput = 600\n'
ROWS = "section[aria-label='By model and tier'] tbody tr"
SIGNED_IN = "sessionStorage.setItem('penstock-key', '%s')"


def call(
    url: str, path: str, body: object = None, method: str | None = None, headers: dict[str, str] | None = None
) -> Any:
    request = urllib.request.Request(
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"} | (headers or {}),
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(url: str, count: int) -> None:
    """Requests from four clients, of two tiers."""

    def client(number: int) -> None:
        for turn in range(count):
            body = {
                "model": "echo",
                "messages": [
                    {"role": "user", "content": f"{'Water under pressure. ' * 8}{turn % 5} {number}"}
                ],
                "max_tokens": 60 + 20 * (turn % 6),
                "service_tier": "priority" if number % 2 else "default",
            }
            call(url, "/v1/chat/completions", body)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("console")
    settings = folder / "settings.toml"
    settings.write_text(PRICES)
    server = start_server(
        folder,
        *("echo", "--replicas", "2", "--max-replicas", "3", "--api-key", KEY, "--usage-ledger"),
        *("--data-dir", str(folder / "data"), "--settings", str(settings), "--show-prompts"),
    )
    ask(server.url, 30)
    yield server.url
    server.stop()


@pytest.fixture
def open_console(open_page: OpenPage, url: str) -> OpenPage:
    """Opens a page of the console, signed in."""

    def open_signed_in(name: str, key: str = KEY, **options: Any) -> Any:
        page = open_page(f"{url}/version", **options)
        page.evaluate(SIGNED_IN % key)
        page.goto(f"{url}/console#/{name}")
        return page

    return open_signed_in


def test_a_stranger_is_asked_for_a_key(open_page: OpenPage, url: str, take_picture: Take) -> None:
    page = open_page(f"{url}/console")
    page.wait_for_selector("h1 >> text=Sign in")
    take_picture(page, "sign-in")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("[role=alert] >> text=Incorrect API key")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    page.wait_for_selector("h1 >> text=Overview")
    page.click("text=Sign out")
    page.wait_for_selector("h1 >> text=Sign in")
    assert page.evaluate("sessionStorage.getItem('penstock-key')") is None


def test_a_key_without_the_scope_gets_a_sentence(open_console: OpenPage, url: str) -> None:
    secret = call(url, "/admin/keys", {"name": "inference only"})["secret"]
    page = open_console("overview", secret)
    alert = page.wait_for_selector("[role=alert]")
    assert "This page needs a key with the scope 'admin'" in alert.inner_text()
    page.click("text=Sign in with another key")
    page.wait_for_selector("#key")


def test_the_overview_shows_traffic_by_model_and_tier(
    open_console: OpenPage, url: str, take_picture: Take
) -> None:
    page = open_console("overview")
    page.wait_for_selector("td >> text=priority")
    assert page.locator("svg.chart").count() == 6
    assert page.locator(".tile").count() == 8
    page.click("figure >> nth=0 >> text=As a table")
    assert page.locator("figure >> nth=0 >> tbody tr").count() > 5
    page.click("figure >> nth=0 >> text=As a table")
    page.select_option("select >> nth=1", "priority")
    page.wait_for_function(f"() => document.querySelectorAll({ROWS!r}).length === 1")
    page.select_option("select >> nth=1", "")
    ask(url, 20)
    page.wait_for_timeout(4500)  # two more samples, for the picture
    take_picture(page, "overview")
    page.emulate_media(color_scheme="dark")
    take_picture(page, "overview-dark")
    for label in ("Last day", "Last hour"):
        page.get_by_label(label).check()
        page.wait_for_selector(".tile >> text=Requests/s")


def test_a_chart_can_be_read_with_the_keyboard(open_console: OpenPage) -> None:
    page = open_console("overview")
    chart = page.wait_for_selector("svg.chart")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert "finished" in page.inner_text(".reading >> nth=0")


def test_the_fleet_is_shown_and_obeys(open_console: OpenPage, take_picture: Take) -> None:
    page = open_console("fleet")
    page.wait_for_selector("th >> text=replica-1")
    assert page.locator("text=longest prefix").count() == 1
    page.click("text=Start a replica")
    page.wait_for_selector("td >> text=start 1: an operator's order")
    page.wait_for_selector('[aria-label="Drain replica-3"]')
    take_picture(page, "fleet")
    page.click('[aria-label="Drain replica-3"]')
    page.click("dialog >> text=Cancel")
    assert page.locator("text=drain replica-3").count() == 0
    page.click('[aria-label="Drain replica-3"]')
    page.click("dialog button.danger")
    page.wait_for_selector("td >> text=drain replica-3: an operator's order")
    page.wait_for_function("() => !document.body.innerText.includes('\\nreplica-3\\t')")


def test_requests_have_a_timeline(open_console: OpenPage, take_picture: Take) -> None:
    page = open_console("requests")
    page.click("button.link >> nth=0")
    detail = page.wait_for_selector("section[aria-label^='Request ']")
    for text in ("Why it waited", "Prefill chunks", "from the cache", "Water under pressure.", "queue"):
        assert text in detail.inner_text(), text
    take_picture(page, "requests")
    page.get_by_label("Failed").check()
    page.wait_for_selector("text=No requests yet.")


def test_a_key_is_made_shown_once_and_revoked(open_console: OpenPage, take_picture: Take) -> None:
    page = open_console("keys")
    page.wait_for_selector("form[aria-label='New workspace']")
    page.fill("form[aria-label='New workspace'] input", "Research")
    page.click("text=Make the workspace")
    page.wait_for_selector("th >> text=Research")
    page.fill("form[aria-label='New key'] input[name=name]", "nightly-jobs")
    page.select_option("select[name=workspace]", label="Research")
    page.select_option("select[name=tier]", "batch")
    page.click("text=Make the key")
    secret = page.wait_for_selector("code.secret").inner_text()
    assert secret.startswith("sk-")
    take_picture(page, "keys")
    page.reload()
    page.wait_for_selector("th >> text=nightly-jobs")
    assert secret not in page.content()
    page.click('[aria-label="Change nightly-jobs"]')
    page.fill("dialog input[name=name]", "weekly-jobs")
    page.click("dialog >> text=Save")
    page.wait_for_selector("th >> text=weekly-jobs")
    page.click('[aria-label="Revoke weekly-jobs"]')
    page.click("dialog button.danger")
    page.wait_for_selector("tr:has-text('weekly-jobs') >> text=revoked")


def test_a_name_is_never_markup(open_console: OpenPage, url: str) -> None:
    name = "<img src=x onerror=alert(1)>"
    call(url, "/admin/keys", {"name": name})
    page = open_console("keys")
    page.wait_for_selector("th >> text=onerror")
    assert page.locator("main img").count() == 0


def test_usage_is_shown_and_saved(open_console: OpenPage, take_picture: Take, tmp_path: Path) -> None:
    page = open_console("usage")
    page.wait_for_selector("td >> text=$")
    page.select_option("select", "key,model")
    page.wait_for_selector("th >> text=static")
    take_picture(page, "usage")
    with page.expect_download() as download:
        page.click("text=CSV")
    download.value.save_as(tmp_path / "usage.csv")
    header, first, *_ = (tmp_path / "usage.csv").read_text().splitlines()
    assert header == "key,model,requests,prompt_tokens,cached_tokens,completion_tokens,cost_usd"
    assert first.startswith("static,echo,")


def test_a_release_begins_and_is_rolled_back(open_console: OpenPage, take_picture: Take) -> None:
    page = open_console("releases")
    page.wait_for_selector("text=No releases")
    page.fill("textarea[name=settings]", "nonsense")
    page.click("text=Start the release")
    page.wait_for_selector("text='nonsense' is no setting. Write it as name = value.")
    page.fill("textarea[name=settings]", "max_num_seqs = 32")
    page.fill("input[name=stage]", "600")
    page.click("text=Start the release")
    page.wait_for_selector("li.now >> text=Shadow")
    page.wait_for_selector("td >> text=requests")
    take_picture(page, "releases")
    page.click("main >> text=Roll back")
    page.click("dialog button.danger")
    page.wait_for_selector(".badge >> text=rolled back")


def test_settings_are_changed_refused_and_reverted(
    open_console: OpenPage, url: str, take_picture: Take
) -> None:
    page = open_console("settings")
    box = page.wait_for_selector("[aria-label='Requests/min: Each key']")
    box.fill("nonsense")
    page.click("text=Save the changes")
    page.wait_for_selector("[role=alert] >> text=limits.key.requests_per_minute is wrong")
    box = page.wait_for_selector("[aria-label='Requests/min: Each key']")
    box.fill("100000")
    page.click("text=Save the changes")
    page.wait_for_selector("text=Version 1, from the database.")
    page.fill("form[aria-label='A limit of its own'] input[name=name]", "key_ci")
    page.fill("form[aria-label='A limit of its own'] input[name=value]", "unlimited")
    page.click("form[aria-label='A limit of its own'] button")
    page.wait_for_selector("th >> text=key_ci")
    assert page.input_value("[aria-label='Requests/min: key_ci']") == "unlimited"
    take_picture(page, "settings")
    page.click('[aria-label="Remove key_ci"]')
    page.click("dialog button.danger")
    page.wait_for_selector("text=Version 3, from the database.")

    page.get_by_label("Prices").check()
    page.fill("[aria-label='Output, $/M: echo']", "700")
    other = {"limits": {"workspace": {"requests_per_minute": 100_000}}}
    call(url, "/admin/settings", other, "PATCH", {"if-match": '"3"'})
    page.click("text=Save the changes")
    alert = page.wait_for_selector("div[role=alert]")
    assert "static made version 4" in alert.inner_text()
    assert "limits.workspace.requests_per_minute: none → 100000" in alert.inner_text()
    assert page.input_value("[aria-label='Output, $/M: echo']") == "700", "what was typed stays"
    take_picture(page, "settings-conflict")
    page.click("text=Save over version 4")
    page.wait_for_selector("text=Version 5, from the database.")
    now = call(url, "/admin/settings")["settings"]
    assert now["prices"]["models"]["echo"] == {"input": 150, "output": 700}
    assert now["limits"]["workspace"] == {"requests_per_minute": 100_000}

    page.get_by_label("Models and routes").check()
    page.fill("form[aria-label='Another name'] input[name=name]", "gpt-4o-mini")
    page.fill("form[aria-label='Another name'] input[name=model]", "echo")
    page.click("form[aria-label='Another name'] button")
    page.wait_for_selector("th >> text=gpt-4o-mini")

    page.get_by_label("All settings").check()
    text = page.input_value("textarea")
    assert "[models.aliases]" in text
    page.fill("textarea", text + "\n[nothing]\nx = 1\n")
    page.click("text=Check and save")
    page.wait_for_selector("[role=alert] >> text=there is no setting 'nothing'")
    assert "x = 1" in page.input_value("textarea")

    page.get_by_label("History").check()
    page.click('[aria-label="Compare version 2"]')
    page.wait_for_selector("li >> text=prices.models.echo.output: 600 → 700")
    take_picture(page, "settings-history")
    page.click('[aria-label="Go back to version 1"]')
    page.click("dialog button.danger")
    page.wait_for_selector("text=Version 7, from the database.")
    page.wait_for_selector("td >> text=back to version 1")


def test_refused_requests_are_shown_by_reason(open_page: OpenPage, open_console: OpenPage, url: str) -> None:
    for key, model in (("wrong", "echo"), (KEY, "no-such-model")):
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(urllib.error.HTTPError):
            call(url, "/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})
    page = open_console("overview")
    rows = page.locator("section[aria-label='Refused requests'] tbody")
    page.wait_for_selector("section[aria-label='Refused requests'] code >> text=model_not_found")
    assert "no key, or a wrong, revoked or expired one" in rows.inner_text()


LEVELS = "[...document.querySelectorAll('h1,h2,h3')].map((each) => Number(each.tagName[1]))"
DOUBLED = """() => { const ids = [...document.querySelectorAll('[id]')].map((each) => each.id);
  return ids.filter((each, place) => ids.indexOf(each) !== place) }"""
NAMELESS = """() => [...document.querySelectorAll('button, a[href], input, select, textarea, [role=img], svg.chart')]
  .filter((each) => each.getClientRects().length && !(each.ariaLabel || each.getAttribute('aria-label')
    || each.getAttribute('aria-labelledby') || each.labels?.length || each.textContent.trim()
    || each.querySelector?.('img[alt], title')))
  .map((each) => each.outerHTML.slice(0, 120))"""
ALL_PAGES = [
    "overview",
    "fleet",
    "releases",
    "requests",
    "keys",
    "usage",
    "settings",
    "playground",
    "simulator",
]


@pytest.mark.parametrize("name", ALL_PAGES)
def test_everything_has_a_name_and_the_keyboard_reaches_it(open_console: OpenPage, name: str) -> None:
    page = open_console(name)
    page.wait_for_selector("main h1, main textarea")
    page.wait_for_timeout(600)
    assert page.evaluate(NAMELESS) == []
    levels = page.evaluate(LEVELS)
    assert levels.count(1) == 1, "one title"
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert page.evaluate(DOUBLED) == []
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('main') !== null")
    seen = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        tag = page.evaluate("document.activeElement.closest('main') ? document.activeElement.tagName : ''")
        if not tag:
            break
        seen.add(tag)
    assert seen & {"BUTTON", "INPUT", "SELECT", "TEXTAREA"}, "the keyboard reaches what can be used"


@pytest.mark.parametrize("name", ALL_PAGES)
def test_a_phone_scrolls_in_one_direction(open_console: OpenPage, take_picture: Take, name: str) -> None:
    page = open_console(name, viewport=PHONE)
    page.wait_for_selector("main h1, main textarea")
    page.wait_for_timeout(500)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"], f"the page is {width} wide"
    if name == "overview":
        take_picture(page, "overview-phone")
        page.click("#menu")
        page.click("nav >> text=Fleet")
        page.wait_for_selector("h1 >> text=Fleet")
