"""The chat page in a real browser, against a server that plays the answers of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from browser import Browser, Page, find_chromium
from ranvier.infer.server.chat_page import read_chat_page

PROGRAM = find_chromium()
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\n\n"
    "**bold** *it* `a<b>` [x](javascript:window.broken=1) [y](https://example.com/)\n\n"
    "# <b>Title</b>\n\n- one\n- two\n  1. three\n\n> quote\n\n"
    "```html\n<script>window.broken = 1</script>\n```\n\n| a | b |\n|---|---|\n| <i> | 2 |\n"
)


class FakeModel(ThreadingHTTPServer):
    """Answers by the last message: see `Handler.answers`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.page = read_chat_page()
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gate = threading.Event()
        self.lost = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeModel

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def reply(self, status: int, kind: str, content: str, **headers: str) -> None:
        data = content.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.path == "/":
            page = self.server.page
            self.reply(
                200, "text/html; charset=utf-8", page.content, content_security_policy=page.policy
            )
        elif self.path == "/v1/models":
            models = [{"id": "tiny"}, {"id": "tiny-lora"}]
            self.reply(200, "application/json", json.dumps({"data": models}))
        else:
            self.reply(404, "application/json", "{}")

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        size = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(size))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["authorization"])
        last = body["messages"][-1]["content"]
        if last == "fail":
            error = {"message": "max_tokens=0 is too small. <b>Use 16.</b>", "type": "x"}
            self.reply(400, "application/json", json.dumps({"error": error}))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            self.stream(last)
        except OSError:
            self.server.lost.set()
        self.close_connection = True

    def event(self, **content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def delta(self, text: str) -> None:
        self.event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])

    def stream(self, last: str) -> None:
        self.event(choices=[{"index": 0, "delta": {"role": "assistant"}}])
        if last == "endless":
            while not self.server.gate.wait(0.01):
                self.delta("word ")
            self.delta("the end")
        elif last == "gated":
            self.delta("first half")
            self.server.gate.wait(60)
            self.delta(", second half é")
        elif last == "broken":
            self.delta("some text")
            self.event(error={"message": "The engine has stopped."})
            return
        elif last == "lost":
            self.delta("some text")
            return
        else:
            text = HOSTILE if last == "hostile" else f"answer {len(self.server.bodies)}"
            for part in re.findall(r"(?s).{1,7}", text):
                self.delta(part)
        self.event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        self.event(choices=[], usage={"completion_tokens": 17})
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("chromium")) as made:
        yield made


@pytest.fixture
def model() -> Iterator[FakeModel]:
    with FakeModel() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser, model: FakeModel) -> Page:
    made = browser.open_page()
    made.open(model.url)
    made.wait_for("document.getElementById('model-name').textContent === 'tiny'")
    return made


LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
IDLE = "document.getElementById('stop').hidden"


def ask(page: Page, text: str) -> None:
    page.type_text(text)
    page.press("Enter")


def finished(page: Page) -> str:
    """The text of the last answer once it is complete."""
    page.wait_for(f"{IDLE} && {LAST}?.querySelector('.tools') != null")
    text: str = page.evaluate(f"{LAST}.querySelector('.body').innerText")
    return text


@needs_chromium
def test_an_answer_is_shown_while_it_streams_and_kept_on_reload(
    page: Page, model: FakeModel
) -> None:
    page.type_text("line")
    page.press("Enter", shift=True)
    page.type_text("gated")
    assert page.evaluate("document.getElementById('input').value") == "line\ngated"
    page.evaluate("document.getElementById('input').value = ''")
    ask(page, "gated")
    page.wait_for(f"{LAST}?.innerText.includes('first half')")
    assert not page.evaluate(IDLE) and "second" not in page.text("#messages")
    model.gate.set()
    assert finished(page) == "first half, second half é"
    assert re.search(r"17 tokens · .*tokens/s · first after", page.text(".note"))
    ask(page, "next")
    assert finished(page).startswith("answer")
    roles = [(one["role"], one["content"]) for one in model.bodies[-1]["messages"]]
    assert roles == [
        ("user", "gated"),
        ("assistant", "first half, second half é"),
        ("user", "next"),
    ]
    assert model.bodies[-1]["model"] == "tiny" and model.bodies[-1]["stream"] is True
    page.type_text("not sent yet")
    before = page.text("#messages")
    page.reload()
    page.wait_for("document.querySelectorAll('.message').length === 4")
    assert page.text("#messages") == before
    assert page.evaluate("document.getElementById('input').value") == "not sent yet"
    page.click("#new")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


@needs_chromium
def test_nothing_comes_from_elsewhere_and_the_policy_is_kept(page: Page, model: FakeModel) -> None:
    ask(page, "hello")
    finished(page)
    requested = [one["request"]["url"] for one in page.events("Network.requestWillBeSent")]
    assert requested and all(url.startswith((model.url, "data:")) for url in requested)
    assert {*model.paths} == {"/", "/v1/models", "/v1/chat/completions"}
    assert not page.events("Log.entryAdded") and not page.events("Runtime.exceptionThrown")


@needs_chromium
def test_text_stays_text(page: Page) -> None:
    ask(page, "hostile")
    text = finished(page)
    assert "<script>window.broken = 1</script><img src=x" in text
    assert page.evaluate("window.broken") is None
    assert page.evaluate("document.querySelectorAll('#messages script, #messages img').length") == 0
    shown = {
        tag: page.evaluate(f"{LAST}.querySelector('{tag}')?.textContent")
        for tag in (
            "strong",
            "em",
            "p code",
            "h2",
            "ul > li",
            "ul ol li",
            "blockquote",
            "pre",
            "td",
        )
    }
    assert shown == {
        "strong": "bold",
        "em": "it",
        "p code": "a<b>",
        "h2": "<b>Title</b>",
        "ul > li": "one",
        "ul ol li": "three",
        "blockquote": "quote",
        "pre": "<script>window.broken = 1</script>",
        "td": "<i>",
    }
    links = page.evaluate(f"[...{LAST}.querySelectorAll('a')].map((a) => [a.textContent, a.href])")
    assert links == [["y", "https://example.com/"]]
    ask(page, "<script>window.broken = 1</script>")
    finished(page)
    assert page.evaluate("window.broken") is None
    assert page.text(".message.user:nth-last-child(2)") == "<script>window.broken = 1</script>"
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".code button")
    assert page.wait_for("window.copied") == "<script>window.broken = 1</script>"


@needs_chromium
def test_an_answer_can_be_stopped_and_retried(page: Page, model: FakeModel) -> None:
    ask(page, "endless")
    page.wait_for(f"{LAST}.innerText.includes('word word')")
    page.press("Escape")
    assert finished(page).startswith("word word") and "stopped" in page.text(".note")
    assert model.lost.wait(60)
    model.lost.clear()
    page.evaluate("[...document.querySelectorAll('.tools button')].at(-1).click()")
    page.wait_for(f"!{IDLE} && {LAST}.innerText.includes('word word')")
    page.click("#stop")
    assert finished(page).startswith("word word") and model.lost.wait(60)
    model.gate.set()
    page.evaluate("[...document.querySelectorAll('.tools button')].at(-1).click()")
    page.wait_for(f"{IDLE} && {LAST}.innerText.includes('the end')")
    assert "stopped" not in page.text(".note")
    sent = [one["messages"] for one in model.bodies]
    assert sent == [[{"role": "user", "content": "endless"}]] * 3
    assert page.evaluate("document.querySelectorAll('.message').length") == 2


ERRORS = {
    "fail": "max_tokens=0 is too small. <b>Use 16.</b> (HTTP 400)",
    "broken": "The engine has stopped.",
    "lost": "The connection was lost before the answer was complete. Retry it.",
}


@needs_chromium
def test_errors_are_readable(page: Page) -> None:
    for asked, expected in ERRORS.items():
        ask(page, asked)
        shown = finished(page)
        assert page.evaluate(f"{LAST}.querySelector('.error').innerText") == expected
        assert shown == ("" if asked == "fail" else "some text")
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    ask(page, "hello")
    finished(page)
    assert "cannot be reached" in page.evaluate(f"{LAST}.querySelector('.error').innerText")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    ask(page, "again")
    assert finished(page).startswith("answer")


@needs_chromium
def test_settings_are_sent_and_kept(page: Page, model: FakeModel) -> None:
    values = {"system": "Be brief.", "temperature": "0,5", "top_p": "x", "max_tokens": "7"}
    page.click("#settings")
    for name, value in {**values, "model": "tiny-lora", "key": "secret"}.items():
        page.evaluate(
            f"(() => {{ const field = document.getElementById('{name}');"
            f"field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})()"
        )
    page.evaluate("document.querySelector('dialog button').click()")
    assert not page.evaluate("document.getElementById('dialog').open")
    page.evaluate("document.getElementById('input').focus()")
    for _ in range(2):
        ask(page, "hello")
        finished(page)
        body = model.bodies[-1]
        sent = {name: body[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        assert sent == {"model": "tiny-lora", "temperature": 0.5, "top_p": "x", "max_tokens": 7}
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert model.keys[-1] == "Bearer secret"
        page.reload()
        page.wait_for("document.getElementById('model-name').textContent === 'tiny-lora'")
    assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")


@needs_chromium
def test_it_fits_on_a_phone(page: Page) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=2,
        mobile=True,
    )
    ask(page, "hostile")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth <= 360")
    box = page.evaluate("JSON.stringify(document.getElementById('send').getBoundingClientRect())")
    place = json.loads(box)
    assert place["right"] <= 360 and place["bottom"] <= 640


def test_the_page_is_one_file_without_inline_handlers() -> None:
    page = read_chat_page()
    assert not re.search(r"\son\w+=|style=|src=|@import|url\(|innerHTML|eval\(", page.content)
    assert "http" not in re.sub(r"https?(:|\?|\\:|s\?:)", "", page.content).replace("http-", "")
    assert page.policy.count("sha256-") == 2 and "unsafe" not in page.policy
