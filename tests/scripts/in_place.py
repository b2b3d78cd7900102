"""Saves over its only checkpoint: what many scripts do."""

import torch
import training

out = training.parse()
torch.manual_seed(0)
job = training.Job()
if (out / "latest.pt").exists():
    job.restore(torch.load(out / "latest.pt"))
    print(f"resumed from step {job.step}")
while job.step < training.STEPS:
    loss = job.train()
    if job.step % training.EVERY == 0:
        torch.save(job.state(), out / "latest.pt")
        print(f"step {job.step} saved, loss {loss:.4f}")
torch.save(job.model.state_dict(), out / "final.pt")
