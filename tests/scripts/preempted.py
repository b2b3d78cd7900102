"""Takes SIGTERM, ends after its step, and saves before it goes, as its first word says.

well: beside, synced, renamed; in-place: over the only checkpoint; forgets: removes what is there,
and leaves; ignores: passes the signal over; default: knows nothing of it.
"""

import os
import signal
import sys

import torch
import training

LAST = sys.argv.pop(1)
out = training.parse()
torch.manual_seed(0)
job = training.Job()
asked = []


def take(number: int, _frame: object) -> None:
    asked.append(number)


def save() -> None:
    beside = out / "step.tmp"
    with beside.open("wb") as file:
        torch.save(job.state(), file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(out / "latest.pt")


def leave() -> None:
    if LAST == "well":
        save()
    elif LAST == "in-place":
        torch.save(job.state(), out / "latest.pt")
    elif LAST == "forgets":
        (out / "latest.pt").unlink(missing_ok=True)
    print(f"stopped by SIGTERM at step {job.step}")
    sys.exit(0)


if LAST != "default":
    signal.signal(signal.SIGTERM, signal.SIG_IGN if LAST == "ignores" else take)
if (out / "latest.pt").exists():
    job.restore(torch.load(out / "latest.pt"))
    print(f"resumed from step {job.step}")
while job.step < training.STEPS:
    job.train()
    if job.step % training.EVERY == 0:
        save()
        print(f"step {job.step} saved")
    if asked:
        leave()
torch.save(job.model.state_dict(), out / "final.pt")
