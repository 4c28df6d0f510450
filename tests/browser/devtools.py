"""A headless browser driven over its DevTools protocol, with the standard library only: the few messages that tests
need."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class WebSocket:
    """Text frames of a client; the server's frames are not masked, and may be split."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=60)
        self._file = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        status = self._file.readline()
        assert b"101" in status, status
        while self._file.readline() != b"\r\n":
            pass

    def send(self, text: str) -> None:
        payload, mask = text.encode(), os.urandom(4)
        n = len(payload)
        size = (
            bytes([0x80 | n])
            if n < 126
            else b"\xfe" + struct.pack("!H", n)
            if n < 65536
            else b"\xff" + struct.pack("!Q", n)
        )
        repeated = mask * (n // 4 + 1)
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated[:n], "big")).to_bytes(n, "big")
        self._socket.sendall(b"\x81" + size + mask + masked)

    def receive(self) -> str:
        message = b""
        while True:
            first, second = self._file.read(2)
            n = second & 0x7F
            if n >= 126:
                n = int.from_bytes(self._file.read(2 if n == 126 else 8), "big")
            payload = self._file.read(n)
            if first & 0x0F in (0, 1):  # a continuation, or text; pings need no answer in so short a time
                message += payload
                if first & 0x80:
                    return message.decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Page:
    """One tab. `problems` collects exceptions, console errors; `requests` every address that was asked for."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"ws://([^:/]+):(\d+)/", line):
                break
        else:
            raise RuntimeError("the browser ended before it said where it listens")
        host, port = found[1], int(found[2])
        tabs = json.load(urlopen(f"http://{host}:{port}/json", timeout=30))
        path = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"].split(str(port), 1)[1]
        self._socket = WebSocket(host, port, path)
        self._last = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._last:
                assert "error" not in message, message["error"]
                return message["result"]
            self._notice(message.get("method"), message.get("params", {}))

    def _notice(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str([argument.get("value") for argument in about["args"]]))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def js(self, expression: str) -> Any:
        """The value of an expression, by way of JSON; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"].get("exception", {}).get("description")
        return found["result"].get("value")

    def open(self, path: Path, ready: str = "document.documentElement?.dataset.ready === 'yes'") -> None:
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + 30
        while not self.js(f"location.href !== 'about:blank' && {ready}"):
            assert time.monotonic() < end, f"not ready after 30 s: {self.problems}"
            time.sleep(0.05)

    def key(self, name: str, code: int, text: str | None = None) -> None:
        more = {} if text is None else {"text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, windowsVirtualKeyCode=code, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, wherever it has to be scrolled to."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefers(self, **features: str) -> None:
        """prefers(color_scheme="dark")."""
        found = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=found)

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)
