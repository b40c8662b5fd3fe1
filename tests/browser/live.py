"""A page in headless Chromium that a test talks to while it lives, over the browser's debugging pipe."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from browser.chromium import CHROMIUM, FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FLAGS = (*FLAGS, "--remote-debugging-pipe", "--window-size=1400,900")
_PATIENCE_S = 60
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")


class Page:
    """One page.

    Attributes:
        complaints: what the console, the content policy or a dialog said, and requests that left the page.
    """

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._unread = b""
        self._calls = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._calls:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + _PATIENCE_S
        while not self.js(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.03)

    def open(self, file: Path, scheme: str = "light") -> None:
        """Shows a file and waits until its script has run."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for("window.thenceReady === true")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._read_from], [], [], _PATIENCE_S)[0], "the browser says nothing"
            received = os.read(self._read_from, 1 << 20)
            assert received, "the browser has gone"
            self._unread += received
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.complaints.append(f"request to {url}")
        elif method in _COMPLAINTS or (
            method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning")
        ):
            self.complaints.append(json.dumps(parameters)[:2000])


@contextmanager
def living_page(folder: Path) -> Iterator[Page]:
    """A browser with one empty page; the folder is for its profile."""
    assert CHROMIUM
    commands, write_to = os.pipe()
    read_from, answers = os.pipe()
    # The browser reads from descriptor 3 and writes to 4; a shell puts them there.
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'
    arguments = (CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}")
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", *arguments],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Page(write_to, read_from)
    finally:
        os.close(write_to)
        os.close(read_from)
        process.terminate()
        process.wait(20)
