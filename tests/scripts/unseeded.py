"""Never seeds torch: no two runs are the same."""

import torch
import training

out = training.parse()
job = training.Job()
if (out / "latest.pt").exists():
    job.restore(torch.load(out / "latest.pt"))
    print(f"resumed from step {job.step}")
while job.step < training.STEPS:
    job.train()
    torch.save(job.state(), out / "latest.pt")
    print(f"step {job.step} saved")
