"""Two ranks with gloo: each saves its part in place, rank 0 names the step afterwards."""

import os
import sys

import torch
import torch.distributed as dist
import training

out = training.parse()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
job = training.Job()
mine = out / f"rank-{rank}.pt"
if (out / "step").exists():
    job.restore(torch.load(mine))
    if rank == 0:
        print(f"resumed from step {job.step}")
while job.step < training.STEPS:
    job.train()
    for value in job.model.parameters():
        dist.all_reduce(value.data)
        value.data /= dist.get_world_size()
    if job.step % training.EVERY == 0:
        torch.save(job.state(), mine)
        dist.barrier()
        if rank == 0:
            (out / "step.tmp").write_text(str(job.step))
            os.replace(out / "step.tmp", out / "step")
            print(f"step {job.step} saved")
        dist.barrier()
if rank == 0:
    torch.save(job.model.state_dict(), out / "final.pt")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may abort a process that ends in the usual way
