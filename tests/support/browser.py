"""A real browser for the tests of pages: what they say, fetch, and how they fit."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (
    "<script>document.title='owned';alert(1)</script>",
    "<img src=http://192.0.2.1/x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} </style></details></html>",
    "\x1b[31mred\x1b[0m \x00 \u202edesrever\u2066 \udcff ]]>",
    "| cell | `code` [link](javascript:alert(1)) @someone #1 ~~x~~",
)
LONG = "w" * 600

# Opens everything, then names what reaches past the right edge or past its own box.
OVERFLOW = """(width => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const name = one => one.tagName + '.' + one.getAttribute('class');
  const seen = [...document.querySelectorAll('body *')].filter(one => !one.closest('svg, .away'));
  const wide = seen.filter(one => one.getBoundingClientRect().right > width + 0.5);
  const cut = seen.filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 1);
  const page = document.documentElement.scrollWidth > width ? ['page'] : [];
  return [...page, ...[...wide, ...cut].map(name)].slice(0, 8);
})"""
CONTRAST = """(() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  const linear = one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const light = rgb => rgb.slice(0, 3).map(one => linear(one / 255))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = parts(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || parent.closest('.away, svg')) continue;
    const [a, b] = [light(parts(getComputedStyle(parent).color)), light(behind(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([ratio, parent.className, walk.currentNode.data.trim().slice(0, 40)]);
  }
  return low.slice(0, 8);
})()"""


class Browser:
    """Headless chromium, spoken to over a pipe: the DevTools protocol without any library."""

    OFF = ("gpu", "background-networking", "component-update", "sync", "dev-shm-usage")
    FLAGS = ("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars")

    def __init__(self, program: str, profile: Path) -> None:
        """Start it, open a page, and ask for everything the page says or fetches."""
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The protocol wants descriptors 3 and 4, so the originals must be neither.
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs, answers)]
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}', program, *self.FLAGS]
        command += [f"--disable-{name}" for name in self.OFF]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        with profile.with_suffix(".log").open("wb") as log:
            # A session of its own: chromium's children end with it.
            self._process = subprocess.Popen(
                command, pass_fds=ends, stdout=log, stderr=log, start_new_session=True
            )
        for one in (theirs, answers, *ends):
            os.close(one)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")
        # Without it an element gets no focus event while the window is not the active one.
        self.page("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        """End the browser and everything it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """Call one method of the protocol and wait for its answer; events are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(answer)
        return answer["result"]

    def page(self, method: str, **params: object) -> dict[str, Any]:
        """Call one method of the page."""
        return self.send(method, self._session, **params)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("chromium closed its pipe")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Open a file at one width of the window and wait until it is laid out."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.page("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.page("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.page("Page.navigate", url=path.as_uri())
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:  # noqa: ANN401  whatever the script gives
        """Evaluate a script in the page."""
        answer = self.page("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer)
        return answer["result"].get("value")

    def complaints(self) -> list[object]:
        """Give console messages, errors, and requests for anything but the file itself."""
        self.run("1")  # what the page said so far has arrived after this
        wanted = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        said: list[object] = [one for one in self.events if one["method"] in wanted]
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        urls = [one["params"]["request"]["url"] for one in sent]
        return said + [url for url in urls if not url.startswith(("file:", "data:"))]
