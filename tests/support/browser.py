"""A headless Chromium, driven through chromedriver's own HTTP interface: pages are tested where they will be read."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no chromium with chromedriver is installed (Debian: apt-get install chromium chromium-driver)"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1240,1500",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Page:
    """One tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        self.visit(path.resolve().as_uri())

    def visit(self, address: str) -> None:
        _call(f"{self._session}/url", {"url": address})

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Until an expression of the page is true; fails where it stays false."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} stayed false at {self.run('return location.href')}")
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return _call(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> str:
        """An element's id for the other calls; fails where nothing fits."""
        return str(_call(f"{self._session}/element", {"using": "css selector", "value": selector})[_ELEMENT])

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(_call(f"{self._session}/element/{self.find(selector)}/text"))

    def click(self, selector: str) -> None:
        _call(f"{self._session}/element/{self.find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        _call(f"{self._session}/element/{self.find(selector)}/value", {"text": keys})

    def hover(self, selector: str) -> None:
        """Move a real pointer to the middle of an element."""
        origin = {_ELEMENT: self.find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        _call(f"{self._session}/actions", {"actions": [mouse]})

    def prefers(self, scheme: str) -> None:
        """Pretend that the reader likes a 'dark' or 'light' page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        parameters = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        _call(f"{self._session}/goog/cdp/execute", parameters)

    def console(self) -> list[str]:
        """Warnings and errors since the last call."""
        entries = _call(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(_call(f"{self._session}/screenshot")))
        return path


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser of its own with an empty profile; it is gone afterwards."""
    if not (CHROMIUM and DRIVER):
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory() as profile:
        log = Path(profile, "driver.log")
        with log.open("w") as out:
            driver = subprocess.Popen([DRIVER, "--port=0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{_port(log)}/session"
            options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}/data"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = _call(address, {"capabilities": {"alwaysMatch": wanted}})
            session = f"{address}/{made['sessionId']}"
            try:
                yield Page(session)
            finally:
                _call(session, method="DELETE")
        finally:
            driver.terminate()
            driver.wait(10)


def _port(log: Path) -> int:
    """The port that the driver says it has taken."""
    for _ in range(200):
        for line in log.read_text().splitlines():
            if "started successfully on port" in line:
                return int(line.rstrip(".").rsplit(" ", 1)[1])
        time.sleep(0.05)
    raise RuntimeError(f"chromedriver did not start: {log.read_text()}")


def _call(url: str, body: object = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the driver is on this machine
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url.rsplit('/', 1)[1]}: {error.read().decode()[:500]}") from None
