"""Two ranks under DDP with gloo; rank 0 saves for both: over the old file, or with --durable well."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import training

DURABLE = "--durable" in sys.argv
sys.argv = [word for word in sys.argv if word != "--durable"]


def save(state: object, path: Path) -> None:
    if not DURABLE:
        torch.save(state, path)
        return
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


out = training.parse()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
job = training.Job()
if (out / "latest.pt").exists():
    job.restore(torch.load(out / "latest.pt"))
    if rank == 0:
        print(f"resumed from step {job.step}")
model = torch.nn.parallel.DistributedDataParallel(job.model)
while job.step < training.STEPS:
    generator = torch.Generator().manual_seed(1000 + 2 * job.step + rank)
    loss = model(torch.randn(16, 32, generator=generator)).square().mean()
    job.optimizer.zero_grad()
    loss.backward()
    job.optimizer.step()
    job.step += 1
    if job.step % training.EVERY == 0:
        if rank == 0:
            save(job.state(), out / "latest.pt")
            print(f"step {job.step} saved")
        dist.barrier()
if rank == 0:
    save(job.model.state_dict(), out / "final.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads abort some interpreters that end with them
