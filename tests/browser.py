"""A headless Chromium, driven over the DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_SECONDS = 60.0


def find_chromium() -> str | None:
    """Path of an installed Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class WebSocket:
    """The client's side of a WebSocket connection (RFC 6455)."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection(
            (place.hostname or "", place.port or 80), timeout=WAIT_SECONDS
        )
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        assert b" 101 " in self._file.readline()
        while self._file.readline().strip():
            pass

    def send(self, text: str) -> None:
        data = text.encode()
        mask = os.urandom(4)
        if len(data) < 126:
            head = struct.pack("!BB", 0x81, 0x80 | len(data))
        elif len(data) < 2**16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, len(data))
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, len(data))
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(head + mask + masked)

    def receive(self) -> str:
        data = b""
        while True:
            first, second = self._file.read(2)
            size = second & 127
            if size == 126:
                (size,) = struct.unpack("!H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._file.read(8))
            part = self._file.read(size)
            # Pings and other control frames need no answer from a client this short-lived.
            if first & 15 < 8:
                data += part
                if first & 128:
                    return data.decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Browser:
    """A Chromium process; its pages share nothing."""

    def __init__(self, program: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ports = folder / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_SECONDS
        while not (ports.exists() and ports.read_text().count("\n")):
            assert time.monotonic() < deadline and self._process.poll() is None, "no Chromium"
            time.sleep(0.02)
        port, path = ports.read_text().split()
        self._socket = WebSocket(f"ws://127.0.0.1:{port}{path}")
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are collected."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        self._socket.send(json.dumps(command))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open_page(self) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        return page

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(WAIT_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._socket.close()


class Page:
    """A tab with its own storage."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of this page so far."""
        self.call("Runtime.evaluate", expression="0")
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == method
        ]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.evaluate("window.isOldPage = true")
        self.call("Page.reload")
        self.wait_for("!window.isOldPage && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        # What an expression names may not exist yet.
        guarded = f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()"
        while not (value := self.evaluate(guarded)):
            text = self.evaluate("document.body?.innerText")
            assert time.monotonic() < deadline, f"{expression} is false in: {text}"
            time.sleep(0.02)
        return value

    def type_text(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        modifiers = 8 if shift else 0
        text = "\r" if key == "Enter" else ""
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", text=text, modifiers=modifiers, **common
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **common)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found
