"""torch alone: Optimizer.load_state_dict casts state to the dtype of its parameter (CKC-COMP-003).

https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.load_state_dict.html says that
what state_dict() returned is loaded, and nothing of a cast.
"""

import sys

import torch


class Masters(torch.optim.Optimizer):
    """SGD with a master in float32 for each parameter, as mixed-precision training keeps it."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float().clone())
                state["master"] -= group["lr"] * parameter.grad.float()
                parameter.copy_(state["master"])


def main() -> None:
    """Train a step in bfloat16, save the state, load it into a second optimizer, compare."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(8).bfloat16()) for _ in range(2)]
    first, second = (Masters([weight]) for weight in weights)
    weights[0].grad = torch.randn(8).bfloat16()
    first.step()
    saved = first.state_dict()
    second.load_state_dict(saved)
    before = saved["state"][0]["master"]
    after = second.state_dict()["state"][0]["master"]
    lost = before.dtype != after.dtype or not torch.equal(before, after.float())
    print(f"master was saved as {before.dtype}, loaded as {after.dtype}: {lost=}")
    sys.exit(lost)


main()
