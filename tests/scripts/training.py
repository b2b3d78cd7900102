"""What the scripts here train: a tiny model whose data follow from the step alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

STEPS, EVERY = 6, 2


def parse() -> Path:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    return out


class Job:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0

    def state(self) -> dict[str, object]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, object]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self) -> float:
        generator = torch.Generator().manual_seed(1000 + self.step)
        batch = torch.randn(16, 32, generator=generator)
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())
