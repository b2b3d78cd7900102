"""A script for whoever owns the training script: it needs that one, torch, and nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.explore import repro
from ckpt_conformance.crash.script.command import FIXED, USUAL_STEPS

if TYPE_CHECKING:
    from ckpt_conformance.crash.explore.exploration import ViolationRecord
    from ckpt_conformance.crash.script.command import Script

TEXT = '''"""$summary

Found by ckpt-conformance under the persistence model $model: $where
`checkpoints/` beside this script is what a crash can leave, `output.txt` is what the training
script printed there. Run: python repro.py
Exit status: 1 while the problem is there, 0 when it is gone, 3 if this script can't tell.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = $command
CWD = $cwd
ROOT = $root  # where {out} was; paths inside of checkpoints may name it
RESULT_FILE, RESULT_COMMAND, EXPECTED = $result_file, $result_cmd, $expected
STEPS = $regex
BY, ALL, PROMISED = $by, $reference, $promised  # how far a run must have come
SECONDS = $deadline
ENVIRONMENT = {**$environment, **os.environ}  # one thread: runs are compared to the bit


def filled(words, root):
    return [word.replace("{out}", str(root)) for word in words]


def leaves(path):
    try:
        import torch

        loaded = torch.load(path, map_location="cpu", weights_only=False)
    except Exception:
        return Path(path).read_bytes()
    found = {}

    def walk(state, name):
        if isinstance(state, torch.Tensor):
            flat = state.detach().resolve_conj().resolve_neg().reshape(-1)
            data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            found[name] = (str(state.dtype), tuple(state.shape), data.numpy().tobytes())
        elif isinstance(state, dict):
            for key, value in state.items():
                walk(value, f"{name}.{key}")
        elif isinstance(state, (list, tuple)):
            for at, value in enumerate(state):
                walk(value, f"{name}.{at}")
        else:
            found[name] = repr(state)

    walk(loaded, "")
    return found


def is_right(root):
    if RESULT_COMMAND:
        words = filled(shlex.split(RESULT_COMMAND), root)
        text = subprocess.run(
            words, cwd=CWD, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        ).stdout
        return text == (HERE / EXPECTED).read_text()
    found, wanted = Path(root) / RESULT_FILE, HERE / EXPECTED
    if not RESULT_FILE or wanted.is_dir():
        return True
    return found.is_file() and leaves(found) == leaves(wanted)


def step_of(line):
    match = re.compile(STEPS).search(line)
    if match is None:
        return None
    spans = [match.span(n) for n in range(1, len(match.groups()) + 1)]
    spans = [one for one in spans if line[slice(*one)].isdecimal()]
    spans = spans or [m.span() for m in re.finditer(r"\\d+", line) if m.end() <= match.end()]
    if not spans:
        return match.group(), -1
    begin, end = spans[-1]
    head = re.sub(r"\\d+", "#", line[match.start() : begin])
    return head + line[begin:end], int(line[begin:end])


def position(output):
    """Count the printed steps that were not done again; None if the output does not tell."""
    items = [item for item in map(step_of, output.splitlines()) if item]
    if BY == "resumed":
        return items[0][1] if items else 0
    if BY not in ("lines", "numbers"):
        return None
    said = [text if BY == "lines" else str(number) for text, number in items]
    said = list(dict.fromkeys(said))
    again = 0
    while again < min(len(said), len(ALL)) and said[-1 - again] == ALL[-1 - again]:
        again += 1
    return len(ALL) - again


def main():
    root = Path(ROOT)
    folder = root.parent if not root.parent.exists() else Path(tempfile.mkdtemp())
    root = folder / root.name
    try:
        shutil.copytree(HERE / "checkpoints", root, symlinks=True)
        return judge(root)
    finally:
        shutil.rmtree(folder)


def judge(root):
    words = filled(COMMAND, root)
    print("$$", shlex.join(words), flush=True)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": ENVIRONMENT}
    try:
        done = subprocess.run(words, cwd=CWD, text=True, timeout=SECONDS, **streams)
    except subprocess.TimeoutExpired:
        print(f"after the crash: no end after {SECONDS:.0f} s")
        return 1
    print(done.stdout[-2000:])
    if done.returncode:
        print(f"after the crash: exit status {done.returncode}")
        return 1
    if not is_right(root):
        print("after the crash: it ends well, with another result than the uninterrupted run")
        return 1
    at = position(done.stdout)
    if at is None and PROMISED:
        print("after the crash: the result is right; the output does not tell where it began")
        return 3
    if PROMISED and at < PROMISED:
        print(f"after the crash: {PROMISED - at} steps were done again that had been saved")
        return 1
    print("after the crash: as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''


def script(record: ViolationRecord, command: Script, **values: object) -> str:
    """Write the script of one bundle; `values` are Python values that the template names."""
    values |= {
        "command": list(command.resume or command.command),
        "cwd": command.cwd,
        "root": command.root,
        "result_file": command.result_file,
        "result_cmd": command.result_cmd,
        "regex": command.step_regex or USUAL_STEPS,
        "environment": FIXED,
    }
    literals = {name: repr(value) for name, value in values.items()}
    return repro.render(TEXT, record, **literals)
