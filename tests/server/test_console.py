"""The web console in a real browser, against a gateway on a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from epic_rag.documents import SUPPORTED_SUFFIXES
from epic_rag.prompt_stream import PromptStream
from epic_rag.server.tenants import Tenant
from tests.rag.stack import TEXTS, tokenizer
from tests.server.running import Running, key_of, running

sync_api = pytest.importorskip("playwright.sync_api", reason="the console's tests need playwright")

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="the console's tests need Chromium on the PATH")

QUESTION = "When does the ferry leave?"
HOSTILE = '<img src=x onerror="window.hurt=1"></script><script>window.hurt=1</script> & <b>bold</b>'
LONG_WORD = "Donaudampfschifffahrtsgesellschaft" * 8
SECONDS = 20.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Console:
    """A tab with the console; at the end it must have been quiet, and have asked nobody but its own server."""

    def __init__(self, browser: Any, gateway: Running, **options: Any) -> None:
        self.gateway = gateway
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(SECONDS * 1000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(gateway.base_url)
        self.page.wait_for_selector("#documents-total:not(:empty), dialog[open]", state="attached")

    def close(self, *expected: str) -> None:
        """Close it; ``expected`` are complaints of the browser about responses that the test provoked."""
        self.context.close()
        assert not [text for text in self.complaints if not any(e in text for e in expected)]
        assert {urlsplit(url).netloc for url in self.asked} == {urlsplit(self.gateway.base_url).netloc}

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name == "policy":
                self.page.select_option("#policy", value)
            else:
                self.page.fill(f"#{name}", str(value))

    def ask(self, question: str) -> Any:
        """Ask, and wait for the whole answer; returns its turn."""
        before = self.page.locator(".turn").count()
        self.page.fill("#question", question)
        self.page.click("#send")
        turn = self.page.locator(".turn").nth(before)
        turn.locator(".timing").wait_for()
        return turn

    def listed(self) -> list[str]:
        return [str(text) for text in self.page.locator("#documents strong").all_text_contents()]

    def until(self, done: Any) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < end, "timed out"
            self.page.wait_for_timeout(20)


@pytest.fixture
def console(browser: Any, gateway: Running) -> Iterator[Console]:
    made = Console(browser, gateway)
    yield made
    made.close()


def add(gateway: Running, texts: dict[str, str]) -> None:
    with gateway.client() as client:
        documents = [{"id": name, "text": text} for name, text in texts.items()]
        assert client.post("/v1/documents", json={"documents": documents}).is_success


def answer_of(gateway: Running, question: str, *, k: int, policy: str, tokens: int) -> Any:
    """The same answer, asked of the API."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "epic": {"policy": policy, "retrieve": {"k": k}},
    }
    with gateway.client() as client:
        return client.post("/v1/chat/completions", json=body).json()


def kinds_of(answer: Any) -> list[str]:
    """What each token of a prompt was, token by token, from the API's own figures."""
    kinds = ["computed"] * answer["usage"]["prompt_tokens"]
    for chunk in answer["epic"]["chunks"]:
        for place in range(chunk["offset"], chunk["offset"] + chunk["tokens"]):
            kinds[place] = "recomputed"
    for start, stop in answer["epic"]["reused_spans"]:
        kinds[start:stop] = ["reused"] * (stop - start)
    return kinds


def last_event(text: str) -> Any:
    *_, last, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))


def test_documents_are_added_from_files_by_dropping_and_pasting(console: Console, tmp_path: Path) -> None:
    page = console.page
    files = [tmp_path / name for name in ("ferry.md", "bakery.txt")]
    for file in files:
        file.write_text(TEXTS[file.stem], encoding="utf-8")
    assert page.text_content("#documents-total") == "none yet"
    page.set_input_files("#files", files)
    console.until(lambda: len(console.listed()) == 2)
    assert page.locator("#jobs li").count() == 0
    assert re.match(r"2 documents added: 2 chunks, \d+ tokens in ", page.text_content("#documents-note"))
    dropped = page.evaluate_handle(
        "text => { const t = new DataTransfer(); t.items.add(new File([text], 'library.md')); return t; }",
        TEXTS["library"],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
    console.until(lambda: len(console.listed()) == 3)
    page.click("#paste summary")
    page.fill("#paste-name", "notes/harbour")
    page.fill("#paste-text", TEXTS["harbour"])
    page.click("#paste-form button")
    console.until(lambda: len(console.listed()) == 4)
    assert page.input_value("#paste-text") == ""
    with console.gateway.client() as client:
        data = client.get("/v1/documents").json()["data"]
    assert [d["id"] for d in data] == ["bakery.txt", "ferry.md", "library.md", "notes/harbour"]
    assert console.listed() == [d["id"] for d in data]
    for row, one in zip(page.locator("#documents li").all(), data, strict=True):
        assert f"1 chunk · {one['tokens']} tokens" in row.text_content()


def test_an_answer_shows_what_the_api_says_of_it(console: Console) -> None:
    add(console.gateway, TEXTS)
    console.page.reload()
    console.set(k=3, longest=12, policy="legolink:4")
    turn = console.ask(QUESTION)
    answer = answer_of(console.gateway, QUESTION, k=3, policy="legolink:4", tokens=12)
    epic, total = answer["epic"], answer["usage"]["prompt_tokens"]
    assert turn.locator(".question").text_content() == QUESTION
    assert turn.locator(".answer").text_content() == answer["choices"][0]["message"]["content"]
    cards = turn.locator(".card").all()
    assert len(cards) == 3
    for card, source in zip(cards, epic["sources"], strict=True):
        assert card.locator("strong").text_content() == source["source"]
        assert card.locator(".text").text_content() == source["text"]
        assert card.locator(".score").text_content() == f"similarity {source['score']:.2f}"

    # The bar, token by token; the chunks' lengths are the tokenizer's own.
    segments = turn.locator(".segment").evaluate_all(
        "all => all.map(s => [s.dataset.kind, +s.dataset.start, +s.dataset.stop, s.getBoundingClientRect().width])"
    )
    assert [a for _, a, _, _ in segments] == [0, *(b for _, _, b, _ in segments[:-1])]
    shown = [kind for kind, start, stop, _ in segments for _ in range(start, stop)]
    assert shown == kinds_of(answer)
    lengths = [len(tokenizer()(s["text"] + "\n\n", add_special_tokens=False)["input_ids"]) for s in epic["sources"]]
    assert len(shown) - shown.count("computed") == sum(lengths) == epic["linked_tokens"]
    assert shown.count("recomputed") == epic["recomputed_tokens"] > 0
    width = turn.locator(".bar").bounding_box()["width"]
    for _, start, stop, wide in segments:
        assert abs(wide - width * (stop - start) / total) < 1
    legend = turn.locator(".legend li").all_text_contents()
    for kind, text in zip(("reused", "recomputed", "computed"), legend, strict=True):
        number = shown.count(kind)
        assert text == f"{kind.title()} {number:,} ({int(100 * number / total + 0.5)} %)"

    # Pointing tells of a segment and lights its source.
    chunk = epic["chunks"][1]
    box = turn.locator(".bar").bounding_box()
    at = box["x"] + box["width"] * (chunk["offset"] + 1.5) / total
    console.page.mouse.move(at, box["y"] + 5)
    detail = turn.locator(".prompt .detail").text_content()
    assert detail == (
        f"4 tokens recomputed · source 2, {epic['sources'][1]['source']} · "
        f"tokens {chunk['offset'] + 1} to {chunk['offset'] + 4}"
    )
    assert [("lit" in (c.get_attribute("class") or "")) for c in cards] == [False, True, False]


def test_the_answer_is_compared_with_full_prefill(console: Console) -> None:
    add(console.gateway, TEXTS)
    console.set(k=4, longest=6, policy="naive")
    console.page.evaluate(
        """() => { const real = window.fetch; window.seen = []; window.fetch = async (path, options) => {
        const response = await real(path, options);
        window.seen.push({ sent: options.body, got: response.clone().text() }); return response; } }"""
    )
    turn = console.ask(QUESTION)
    turn.get_by_role("button", name="Compare with full prefill").click()
    turn.locator(".time").nth(1).wait_for()
    seen = console.page.evaluate("Promise.all(window.seen.map(async s => [s.sent, await s.got]))")
    (sent, first), (again, second) = [(json.loads(body), last_event(text)["epic"]) for body, text in seen]
    assert again == {**sent, "max_tokens": 1, "epic": {**sent["epic"], "policy": "full"}}
    assert (second["policy"], second["reused_tokens"]) == ("full", 0)
    ttft, slow = first["times"]["first_token"], second["times"]["first_token"]
    more = max(slow, ttft) / min(slow, ttft)
    assert f"{more:.1f}×" in turn.locator(".verdict").text_content()
    widths = [fill.bounding_box()["width"] for fill in turn.locator(".fill").all()]
    assert widths[0] / widths[1] == pytest.approx(ttft / slow, rel=0.05)
    assert turn.get_by_role("button", name="Compare").count() == 0


def test_an_answer_grows_and_is_stopped_by_escape(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PromptStream.next_event

    async def slowly(stream: PromptStream) -> Any:
        await asyncio.sleep(0.03)
        return await real(stream)

    monkeypatch.setattr(PromptStream, "next_event", slowly)
    add(console.gateway, TEXTS)
    console.set(k=1, longest=200)
    page = console.page
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    answer = page.locator(".answer")
    console.until(lambda: answer.count() and answer.text_content())
    assert answer.get_attribute("aria-busy") == "true"
    assert answer.get_attribute("aria-live") == "polite"
    assert page.locator("#stop").is_visible()
    length = len(answer.text_content())
    console.until(lambda: len(answer.text_content()) > length)
    assert page.locator(".card").count() == 1
    page.press("#question", "Escape")
    page.wait_for_selector("#send", state="visible")
    assert page.locator(".turn .note").text_content() == "Stopped."
    assert answer.get_attribute("aria-busy") == "false"
    console.until(lambda: console.gateway.app.state.admission.running == 0)
    console.gateway.check_idle()


def test_later_questions_carry_the_conversation(console: Console) -> None:
    add(console.gateway, TEXTS)
    console.set(k=1, longest=5)
    first = console.ask(QUESTION).locator(".answer").text_content()
    with console.page.expect_request("**/v1/chat/completions") as second:
        console.ask("And <b>why</b>?\nSay it.")
    assert second.value.post_data_json["messages"] == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And <b>why</b>?\nSay it."},
    ]
    console.page.click("#new")
    assert console.page.locator(".turn").count() == 0
    with console.page.expect_request("**/v1/chat/completions") as third:
        console.ask("Again?")
    assert len(third.value.post_data_json["messages"]) == 1


def test_everything_is_done_with_the_keyboard(console: Console) -> None:
    page, keys = console.page, console.page.keyboard

    def tab_to(selector: str, key: str = "Tab") -> None:
        for _ in range(60):
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                style = page.evaluate(
                    "(() => { const a = document.activeElement, at = a.matches('#files') ? a.nextElementSibling : a;"
                    " const s = getComputedStyle(at); return [s.outlineStyle, parseFloat(s.outlineWidth)]; })()"
                )
                assert style[0] != "none"
                assert style[1] > 0
                return
            keys.press(key)
        raise AssertionError(f"{selector} cannot be reached")

    assert page.evaluate("document.activeElement.id") == "question"
    tab_to("#files", "Shift+Tab")
    tab_to("#paste summary")
    keys.press("Enter")
    tab_to("#paste-name")
    keys.type("ferry")
    tab_to("#paste-text")
    keys.type(TEXTS["ferry"])
    tab_to("#paste-form button")
    keys.press("Enter")
    console.until(lambda: console.listed() == ["ferry"])
    tab_to("#question")
    keys.type("When does")
    keys.press("Shift+Enter")
    keys.type("it leave?")
    tab_to("#longest")
    keys.press("ControlOrMeta+A")
    keys.type("6")
    tab_to("#question", "Shift+Tab")
    keys.press("Enter")
    page.wait_for_selector(".timing")
    assert page.text_content(".question") == "When does\nit leave?"

    tab_to(".bar", "Shift+Tab")
    options = page.locator(".segment")
    said = [options.nth(i).get_attribute("aria-label") for i in range(options.count())]
    assert page.get_attribute(".bar", "role") == "listbox"
    for key, place in (("Home", 0), ("ArrowRight", 1), ("End", len(said) - 1), ("ArrowRight", -1), ("ArrowLeft", -2)):
        keys.press(key)
        assert page.text_content(".prompt .detail") == said[place], key
        active = page.get_attribute(".bar", "aria-activedescendant")
        assert page.get_attribute(f"#{active}", "aria-selected") == "true"
    tab_to(".timing button")
    keys.press("Enter")
    page.locator(".time").nth(1).wait_for()

    tab_to("#documents button", "Shift+Tab")
    keys.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    keys.press("Escape")
    assert page.evaluate("document.activeElement.dataset.id") == "ferry"
    keys.press("Enter")
    keys.press("Tab")
    keys.press("Enter")
    console.until(lambda: not console.listed())
    console.until(lambda: page.evaluate("document.activeElement.id") == "documents-title")


def test_a_document_is_deleted_when_that_was_confirmed(console: Console) -> None:
    add(console.gateway, {"a/b c?.md": TEXTS["ferry"], "bakery": TEXTS["bakery"]})
    page = console.page
    page.reload()
    delete = page.get_by_role("button", name="Delete a/b c?.md")
    delete.click()
    assert page.text_content("#sure-title") == "Delete a/b c?.md?"
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_timeout(100)
    with console.gateway.client() as client:
        assert len(client.get("/v1/documents").json()["data"]) == 2
        delete.click()
        page.click("#sure .danger")
        console.until(lambda: console.listed() == ["bakery"])
        assert [d["id"] for d in client.get("/v1/documents").json()["data"]] == ["bakery"]
    assert page.text_content("#documents-note") == "a/b c?.md was deleted."


def test_adding_shows_how_far_it_is_and_is_cancelled(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def slowly(_: Tenant, documents: Any, progress: Any) -> Any:
        try:
            progress("read", len(documents), len(documents))
            for done in range(2000):
                progress("compile", done, 2000)
                time.sleep(0.01)
        finally:
            ended.append(True)

    monkeypatch.setattr(Tenant, "add_documents", slowly)
    page = console.page
    page.click("#paste summary")
    page.fill("#paste-name", "ferry")
    page.fill("#paste-text", "Some text.")
    page.click("#paste-form button")
    bar = page.locator("#jobs progress")
    console.until(lambda: bar.evaluate("p => p.max === 2000 && p.value > 10"))
    assert re.match(r"Compiling: [\d,]+ of 2,000 tokens", page.text_content("#jobs .meta"))
    page.click("#jobs button")
    console.until(lambda: ended)
    console.until(lambda: page.locator("#jobs li").count() == 0)
    assert page.text_content("#documents-note").startswith("Cancelled.")
    assert page.input_value("#paste-text") == "Some text."


def test_hostile_texts_are_shown_as_texts(console: Console) -> None:
    page = console.page
    page.click("#paste summary")
    page.fill("#paste-name", HOSTILE)
    page.fill("#paste-text", f"{HOSTILE} the ferry")
    page.click("#paste-form button")
    console.until(lambda: page.locator("#documents li").count() == 1)
    console.set(longest=4)
    turn = console.ask(HOSTILE)
    turn.locator(".bar").hover()
    assert turn.locator(".question").text_content() == HOSTILE
    assert turn.locator(".card .text").text_content() == f"{HOSTILE} the ferry"
    assert console.listed() == [HOSTILE]
    page.locator("#documents button").click()
    assert page.text_content("#sure-title") == f"Delete {HOSTILE}?"
    assert page.evaluate("window.hurt") is None
    assert page.locator("img:not([src='console/icon.svg']), b:not(.legend b), main script").count() == 0


def test_errors_are_told_in_the_servers_words(browser: Any, gateway: Running, tmp_path: Path) -> None:
    console = Console(browser, gateway)
    page = console.page
    console.set(longest=5000)
    page.fill("#question", QUESTION)
    page.click("#send")
    error = page.locator(".turn [role=alert]")
    error.wait_for()
    told = answer_of(gateway, QUESTION, k=6, policy="auto", tokens=5000)["error"]["message"]
    assert error.text_content() == told
    bad = tmp_path / "bad.pdf"
    bad.write_bytes(b"no pdf")
    page.set_input_files("#files", [bad])
    shown = page.locator("#jobs [role=alert]")
    shown.wait_for()
    with gateway.client() as client:
        refused = client.post("/v1/documents", files=[("files", ("bad.pdf", b"no pdf"))])
    assert shown.text_content() == refused.json()["error"]["message"]
    page.click("#jobs button")
    assert page.locator("#jobs li").count() == 0
    console.close("status of 400")


def test_a_key_is_asked_for_where_one_is_needed(browser: Any, two_keys: Running) -> None:
    console = Console(browser, two_keys)
    page = console.page

    def give(key: str) -> None:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", key)
        page.press("#key", "Enter")

    with two_keys.client() as client:
        told = client.get("/v1/documents").json()["error"]["message"]
    page.wait_for_selector("#key-dialog[open]")
    assert page.text_content("#key-why") == told
    give("a wrong key of some length")
    console.until(lambda: page.evaluate("sessionStorage.getItem('epic-rag-key')") == "a wrong key of some length")
    console.until(lambda: page.locator("#key-dialog[open]").count() == 1)
    with two_keys.client("ann") as client:
        client.post("/v1/documents", json={"documents": [{"id": "anns", "text": TEXTS["ferry"]}]})
    with two_keys.client("bob") as client:
        client.post("/v1/documents", json={"documents": [{"id": "bobs", "text": TEXTS["ferry"]}]})
    give(key_of("ann"))
    console.until(lambda: console.listed() == ["anns"])
    page.reload()
    console.until(lambda: console.listed() == ["anns"])
    assert page.text_content("#key-open") == "API key set"
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    assert key_of("ann") not in page.content()

    # A question is not lost while the key is looked for.
    page.evaluate("sessionStorage.clear()")
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    give(key_of("bob"))
    console.until(lambda: console.listed() == ["bobs"])
    assert page.input_value("#question") == QUESTION
    console.set(longest=4)
    assert console.ask(QUESTION).locator(".card strong").text_content() == "bobs"
    console.close("status of 401")


def test_a_phone_scrolls_in_one_direction_only(browser: Any, gateway: Running) -> None:
    add(gateway, {f"folder/{LONG_WORD}.md": f"{LONG_WORD} {TEXTS['ferry']} " * 3, **TEXTS})
    console = Console(
        browser,
        gateway,
        viewport={"width": 360, "height": 740},
        is_mobile=True,
        has_touch=True,
        reduced_motion="reduce",
        color_scheme="dark",
    )
    page = console.page

    def check() -> None:
        found = page.evaluate(
            """[...document.querySelectorAll("body *")].filter(e => e.checkVisibility() && !e.matches(".unseen, option")
            && (r => r.width && (r.right > 360.5 || r.left < -0.5))(e.getBoundingClientRect())).map(e => e.outerHTML)"""
        )
        assert found == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

    check()
    console.set(longest=40, k=5, policy="legolink:4")
    turn = console.ask(f"{LONG_WORD}? {QUESTION}")
    turn.get_by_role("button", name="Compare").click()
    turn.locator(".time").nth(1).wait_for()
    for more in turn.locator(".card button").all():
        more.click()
    turn.locator(".bar").tap()
    assert "tokens" in turn.locator(".prompt .detail").text_content()
    check()
    still = page.evaluate("getComputedStyle(document.querySelector('.answer'), '::after').animationName")
    assert still == "none"
    page.click(".views [data-view=documents]")
    assert not page.locator(".ask").is_visible()
    check()
    page.locator("#documents button").first.click()
    check()
    console.close()


def test_the_page_is_strict_and_can_be_left_out(tmp_path: Path, shared_gateway: Running) -> None:
    files = {f.name for f in (resources.files("epic_rag.server") / "console").iterdir() if f.is_file()}
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    with shared_gateway.client() as client:
        page = client.get("/")
        assert f'accept="{",".join(SUPPORTED_SUFFIXES)}"' in page.text
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", page.text)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in files:
            got = client.get(f"/console/{name}")
            assert got.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
            assert got.headers["content-security-policy"] == policy
            assert got.headers["x-content-type-options"] == "nosniff"
        for name in ("none.js", "..%2Fapp.py", "%2e%2e/app.py", "__init__.py", "", "."):
            assert client.get(f"/console/{name}").status_code == 404
        assert "innerHTML" not in "".join(client.get(f"/console/{name}").text for name in files)
    with running(tmp_path, console=False) as gateway, gateway.client() as client:
        assert [client.get(path).status_code for path in ("/", "/console/console.js", "/health")] == [404, 404, 200]
