"""The files of a certificate: what they say, that hostile text stays text, how the page looks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance import report
from ckpt_conformance.certificate import SCHEMA
from ckpt_conformance.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (
    "<script>document.title='owned';alert(1)</script>",
    "<img src=http://192.0.2.1/x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} </style></details></html>",
    "\x1b[31mred\x1b[0m \x00 \u202edesrever\u2066 \udcff ]]>",
    "| cell | `code` [link](javascript:alert(1)) @someone #1 ~~x~~",
)
LONG = "w" * 600
EVIDENCE = {
    "step served": 20,
    "steps acknowledged": [10, 20, 30],
    "component": "optimizer",
    "digest saved": "blake2b:9f2c6b1d77e04a55a1b0c3d2e4f5061728394a5b",
    "digest served": "blake2b:03ac674216f3e15c761ee1a5e255f067953623c8",
    "file": "/tmp/ckpt-conformance/run-7/step-0000000030/__0_0.distcp",
    "damage": {"kind": "bit flip", "offset": 40961, "bit": 3, "file size": 1048576},
}
STATEMENTS = {
    "SMOK": "What was saved at a step can be loaded at that step in a new process",
    "RTRP": "Every tensor comes back bit for bit: dtype, shape, bytes and NaN payloads",
    "COMP": "The optimizer's moments, step counts and parameter groups come back",
    "RSUM": "The resumed run takes the same steps as a run that never stopped",
    "ATOM": "A process killed at any write leaves a whole checkpoint, and discovery serves it",
    "CORR": "One flipped bit in the payload is refused, never served",
    "IOER": "A save that met a full disk raises, and the step is not advertised",
    "DISC": "Discovery ignores what was never committed, whatever it is called",
    "RETN": "Rotation keeps the newest whole checkpoints and deletes its own files only",
    "INTN": "A request for a step that is not there raises; another step is never served",
    "SECU": "Loading runs no code from the checkpoint",
    "SIDE": "Saving changes nothing: the next training step has the same bits",
}
WHY = (
    "A power cut or a scheduler stops the job in the middle of a save. The run that resumes from "
    "what is left carries on from weights that nobody saved, and nothing in its log says so."
)
PROFILES = {
    "smoke": "the least that can be called a checkpoint",
    "resume": "a resumed run is the run that never stopped",
    "crash": "a process that is killed at any point loses nothing that was acknowledged",
    "damage": "damaged bytes are refused, never served",
    "io-error": "full disks and failing calls reach the caller",
    "retention": "rotation keeps what is needed and deletes only its own",
    "security": "a checkpoint is data, not a program",
}


def one_check(verdict: str, reason: str, number: int = 0) -> dict[str, Any]:
    """Make one entry of an invariant's checks."""
    name = f"ckpt_conformance.suites.test_damage::bit_flip[payload-{number}]"
    found = {"name": name, "verdict": verdict, "reason": reason, "seconds": 0.25 + number}
    return found | {"rate": None, "evidence": dict(EVIDENCE)}


def one_invariant(family: str, number: int, verdict: str) -> dict[str, Any]:
    """Make one invariant of a result."""
    practice = verdict == Verdict.NOT_MET or number % 4 == 3
    reason = REASONS[verdict]
    told = verdict in {"VIOLATION", "NOT_MET"}
    return {
        "family": family,
        "statement": STATEMENTS[family] + (f", case {number}" if number > 1 else ""),
        "why": WHY,
        "basis": "practice" if practice else ("contract", "promise")[number % 2],
        "level": "SHOULD" if practice else "MUST",
        "profiles": list(PROFILES)[1 : 2 + number % 3],
        "incidents": ["A01", "https://example.org/issues/7", "javascript:alert(1)"][: number % 4],
        "verdict": verdict,
        "owner": "library" if told else None,
        "grade": "reproduced with a real process" if told else None,
        "rate": [40, 64] if told else None,
        "reason": reason,
        "checks": [one_check(verdict, reason, index) for index in range(1 + number % 3)],
        "evidence": dict(EVIDENCE) if told else {},
        "reproduce": f"ckpt-conformance certify torch-save-inplace --only CKC-{family}-{number:03}"
        " --seed 0 --budget quick",
    }


REASONS = {
    "PASS": "",
    "VIOLATION": "step 30 was acknowledged, and after the kill step 20 was served: LOST_STEP",
    "NOT_MET": "a flipped bit in the payload loads without an error",
    "UNKNOWN": "the control without the fault failed: the worker ended with signal 9",
    "NOT_APPLICABLE": "the manager does not declare the capability `mirror`",
    "WAIVED": "accepted until 2.14, see the project's issue 12",
}


def make_result(verdicts: list[str], name: str = "torch-save-inplace") -> dict[str, Any]:
    """Make a result whose invariants have these verdicts, spread over the families."""
    wheel = zip(itertools.cycle(STATEMENTS), itertools.count(), verdicts, strict=False)
    invariants = {
        f"CKC-{family}-{1 + index // len(STATEMENTS):03}": one_invariant(
            family, 1 + index // len(STATEMENTS), verdict
        )
        for family, index, verdict in wheel
    }
    details = {
        profile: {
            "verdict": ("PASS", "VIOLATION", "UNKNOWN", "NOT_APPLICABLE")[index % 4],
            "description": description,
            "counts": {"PASS": 4 + index, "NOT_MET": 1 + index % 3},
        }
        for index, (profile, description) in enumerate(PROFILES.items())
    }
    return {
        "schema": SCHEMA,
        "suite": {"version": "0.1.0", "commit": "a" * 40, "catalogue": 1},
        "created": "2026-01-31T12:00:00+00:00",
        "interrupted": False,
        "environment": {
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "kernel": "Linux 6.18.44",
            "machine": "x86_64",
            "filesystem": "ext4",
            "cpus": 4,
        },
        "adapter": {
            "name": name,
            "version": "2.13.0",
            "shape": "manager",
            "capabilities": ["explicit-step", "retention"],
            "holds": ["extra", "model", "optimizer", "rng", "scheduler"],
            "library": "torch 2.13.0+cpu",
            "recipe": "torch.save to the final name, one file for all steps",
            "owner": "recipe",
            "notes": "",
        },
        "seed": 0,
        "budget": "quick",
        "claims": ["damage"],
        "asked": {"profiles": [], "only": []},
        "profiles": {profile: one["verdict"] for profile, one in details.items()},
        "profile_details": details,
        "invariants": invariants,
        "harness": [],
        "crash": {},
        "waivers": [],
    }


def rich_result() -> dict[str, Any]:
    """Make a result with every verdict, hostile text everywhere, and very long words."""
    verdicts = ["VIOLATION", "NOT_MET", "UNKNOWN", "NOT_APPLICABLE", "WAIVED", *["PASS"] * 5]
    result = make_result((verdicts * 7)[:70])
    for text, one in zip([*HOSTILE, LONG], result["invariants"].values(), strict=False):
        one |= {"reason": text, "why": text, "statement": one["statement"] + " " + text}
        one["evidence"] = {text: text, "nested": {text: [text, {"deep": text}]}, "n": 1.5}
        one["checks"][0]["name"] = text
        one["profiles"] = [*one["profiles"], text]
        one["reproduce"] += " " + text
        one["incidents"] = ["A01", text]
    result["adapter"] |= {"notes": HOSTILE[0] + LONG, "capabilities": [LONG, HOSTILE[1]]}
    result["harness"] = [one_check("UNKNOWN", HOSTILE[0] + LONG)]
    result["waivers"] = [{"invariant": "CKC-ATOM-001", "reason": HOSTILE[2]}]
    result["crash"] = {"kill": {"states": 137, "unique": 40, "outcomes": {"NEW": 30, LONG: 10}}}
    return result


class Browser:
    """Headless chromium, spoken to over a pipe: the DevTools protocol without any library."""

    FLAGS = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    )

    def __init__(self, program: str, profile: Path) -> None:
        self._ids = itertools.count(1)
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        # The protocol wants descriptors 3 and 4; our ends must not be among them.
        moved = [os.dup(one) for one in (theirs, answers)]
        for one in (theirs, answers):
            os.close(one)
        actions = [(os.POSIX_SPAWN_DUP2, moved[0], 103), (os.POSIX_SPAWN_DUP2, moved[1], 104)]
        actions += [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4)]
        log = str(profile.parent / "chromium.log")
        actions.append((os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o644))
        command = [program, *self.FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # A session of its own: chromium's children end with it.
        self._process = os.posix_spawn(
            program, command, os.environ, file_actions=actions, setsid=True
        )
        for one in moved:
            os.close(one)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and everything it started."""
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
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
        assert "error" not in answer, answer
        return answer["result"]

    def page(self, method: str, **params: object) -> dict[str, Any]:
        """Call one method of the page."""
        return self.send(method, self._session, **params)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "chromium closed its pipe; see chromium.log"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Open a file at one width of the window and wait until it is laid out."""
        self.page(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.page("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.page("Page.navigate", url=path.as_uri())
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:  # noqa: ANN401  whatever the script gives
        """Evaluate a script in the page."""
        answer = self.page("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[object]:
        """Give console messages, errors, and requests for anything but the file itself."""
        self.run("1")  # what the page said so far has arrived after this
        wanted = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        said: list[object] = [one for one in self.events if one["method"] in wanted]
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        urls = [one["params"]["request"]["url"] for one in sent]
        return said + [url for url in urls if not url.startswith(("file:", "data:"))]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        started = Browser(CHROMIUM, Path(folder) / "profile")
        try:
            yield started
        finally:
            started.close()
