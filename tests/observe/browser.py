"""A headless Chromium, spoken to through its DevTools pipe (messages of JSON that end in a zero byte on descriptors 3 and 4): no driver, no port, no package.

Messages: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
DEADLINE_S = 60.0
CLOSE_S = 10.0


def find_browser() -> str | None:
    """Path of a Chromium: AREAL_HPC_BROWSER, or one of PROGRAMS."""
    return os.environ.get("AREAL_HPC_BROWSER") or next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own. `with Browser(program, folder) as browser:`; the profile lies in `folder`."""

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
        ]
        command = [program, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # the numbers that the browser expects, whatever ours are
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "browser", *command], pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._next, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        """What the page said: requests, console messages, exceptions."""
        target = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
        except (OSError, TimeoutError, RuntimeError):
            self._process.kill()
        os.close(self._in)
        os.close(self._out)
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of one command. Raises RuntimeError for an error, TimeoutError after DEADLINE_S."""
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        stop_at = time.monotonic() + DEADLINE_S
        while True:
            answer = self._read(stop_at)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _read(self, stop_at: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, stop_at - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer within {DEADLINE_S:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, height: int, *, mobile: bool = False) -> None:
        """Load a file at a size of the window in CSS pixels, until all of it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile)
        self.call("Page.navigate", url=page.resolve().as_uri())
        stop_at = time.monotonic() + DEADLINE_S
        while not (self.value("document.URL").startswith("file:") and self.value("document.readyState") == "complete"):
            if time.monotonic() > stop_at:
                raise TimeoutError(f"{page} was not loaded within {DEADLINE_S:g} s")
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, awaited if it is a promise. Raises RuntimeError when it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """PNG of the whole page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses asked for, those inside the page (data:) left out."""
        asked = (event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [url for url in asked if not url.startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Console errors and warnings, exceptions, and entries of the browser's own log."""
        found = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert")):
                found.append(json.dumps(parameters))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
        return found
