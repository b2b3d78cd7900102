"""Syncs the file, renames it, syncs the directory; resumes from the newest file that is whole.

One call may be left out with --without, to see which finding names it.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import training

parser = argparse.ArgumentParser()
parser.add_argument("--without", choices=["file-sync", "directory-sync"])
WITHOUT = parser.parse_known_args()[0].without
sys.argv = [word for word in sys.argv if word not in {"--without", WITHOUT}]


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(state: object, path: Path) -> None:
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        if WITHOUT != "file-sync":
            os.fsync(file.fileno())
    beside.rename(path)
    if WITHOUT != "directory-sync":
        sync(path.parent)


def resume(job: training.Job, out: Path) -> None:
    for path in sorted(out.glob("step-*.pt"), reverse=True):
        try:
            job.restore(torch.load(path))
        except Exception as error:
            print(f"{path.name} is damaged ({type(error).__name__})")
            continue
        print(f"resumed from step {job.step}")
        return


out = training.parse()
torch.manual_seed(0)
job = training.Job()
resume(job, out)
while job.step < training.STEPS:
    loss = job.train()
    if job.step % training.EVERY == 0:
        save(job.state(), out / f"step-{job.step:04}.pt")
        print(f"step {job.step} saved, loss {loss:.4f}")
save(job.model.state_dict(), out / "final.pt")
