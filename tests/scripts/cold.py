"""Begins anew whenever its checkpoint does not load: the result is right, the work is lost."""

import torch
import training

out = training.parse()
torch.manual_seed(0)
job = training.Job()
try:
    job.restore(torch.load(out / "latest.pt"))
    print(f"resumed from step {job.step}")
except Exception:
    print("no checkpoint")
while job.step < training.STEPS:
    loss = job.train()
    if job.step % training.EVERY == 0:
        torch.save(job.state(), out / "latest.pt")
        print(f"step {job.step} saved, loss {loss:.4f}")
torch.save(job.model.state_dict(), out / "final.pt")
