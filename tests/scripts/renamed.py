"""Saves beside and renames, a file for each step, and syncs nothing."""

import torch
import training

out = training.parse()
torch.manual_seed(0)
job = training.Job()
found = sorted(out.glob("step-*.pt"))
if found:
    job.restore(torch.load(found[-1]))
    print(f"resumed from step {job.step}")
while job.step < training.STEPS:
    loss = job.train()
    if job.step % training.EVERY == 0:
        torch.save(job.state(), out / "step.tmp")
        (out / "step.tmp").rename(out / f"step-{job.step:04}.pt")
        print(f"step {job.step} saved, loss {loss:.4f}")
torch.save(job.model.state_dict(), out / "final.pt")
