"""Drives Chromium through chromedriver's HTTP protocol (W3C WebDriver), with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)
KEYS = {
    "right": "\ue014",
    "left": "\ue012",
    "down": "\ue015",
    "up": "\ue013",
    "tab": "\ue004",
    "enter": "\ue007",
    "escape": "\ue00c",
}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def why_not() -> str:
    """Why no browser can be driven here, or nothing. CI skips nothing: there a missing browser fails the tests."""
    if os.environ.get("CI"):
        return ""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"needs {program}; on Debian: apt-get install chromium chromium-driver"
    return ""


class Browser:
    """One window; `with Browser() as browser`."""

    def __enter__(self) -> Browser:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.base = f"http://127.0.0.1:{self._port()}"
            options = {"args": [*FLAGS, f"--user-data-dir={self.profile.name}"], "binary": shutil.which("chromium")}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options}
            wanted["goog:loggingPrefs"] = {"browser": "ALL", "performance": "ALL"}
            session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self.base += f"/session/{session['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._stop()

    def _stop(self) -> None:
        self.driver.terminate()
        self.driver.wait(30)
        if self.driver.stdout is not None:
            self.driver.stdout.close()
        self.profile.cleanup()

    def _port(self) -> int:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                return int(line.rstrip(". \n").rsplit(" ", 1)[1])
        raise RuntimeError("chromedriver did not start")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=180) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None

    # what a person does

    def open(self, path: Path, fragment: str = "") -> None:
        self.go(path.resolve().as_uri() + fragment)

    def go(self, address: str) -> None:
        self._ask("POST", "/url", {"url": "about:blank"})
        self.log("browser"), self.log("performance")
        self._ask("POST", "/url", {"url": address})

    def size(self, width: int, height: int) -> None:
        """The size of the page's own window, below any width a desktop window could have."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def prefer(self, **features: str) -> None:
        found = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", {"features": found})

    def point(self, x: float, y: float, click: bool = False) -> None:
        steps: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        if click:
            steps += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]})

    def press(self, *keys: str) -> None:
        steps = [{"type": way, "value": KEYS.get(key, key)} for key in keys for way in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    # what a person sees

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def enter_frame(self, n: int | None) -> None:
        """What is run and asked from now on, in the page's nth frame; in the page itself for None."""
        self._ask("POST", "/frame", {"id": n})

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until a JavaScript expression holds."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {condition}; the log: {self.log('browser')}")
            time.sleep(0.05)

    def centre(self, selector: str, n: int = 0) -> tuple[float, float]:
        """The middle of the nth element, scrolled into view."""
        return tuple(
            self.run(
                "const e = document.querySelectorAll(arguments[0])[arguments[1]]; e.scrollIntoView({block: 'center'});"
                "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]",
                selector,
                n,
            )
        )

    def enter(self, selector: str | None) -> None:
        """Into a frame; None leads out again."""
        frame = None if selector is None else self.run("return document.querySelector(arguments[0])", selector)
        self._ask("POST", "/frame", {"id": frame})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self._ask("POST", "/se/log", {"type": kind})  # type: ignore[no-any-return]

    def requests(self) -> list[str]:
        """Every address asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))
