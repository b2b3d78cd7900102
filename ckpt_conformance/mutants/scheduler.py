"""The scheduler or the learning rate comes back changed (bugs F)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS, SCHEDULER = "CKC-COMP-004", "CKC-COMP-005"
RUN = "CKC-RSUM-001"


@mutant(
    "F01",
    url="Lightning-AI/pytorch-lightning#1772",
    change="the save comes between the optimizer's step and the scheduler's",
    violates={GROUPS, SCHEDULER, RUN},
    base="reference-trainer",
)
class SavedBeforeSchedule(Trainer):
    """The scheduler steps when the next batch is fetched: after the save."""

    due = False

    def schedule(self, job: Any) -> None:
        """Note that the scheduler is due."""
        del job
        self.due = True

    def batches(self, job: Any) -> Iterator[Any]:
        """Step the scheduler on the way to the next batch."""
        for batch in super().batches(job):
            if self.due:
                super().schedule(job)
                self.due = False
            yield batch


@mutant(
    "F02",
    url="Lightning-AI/pytorch-lightning#12812",
    change="after the load the scheduler writes its rate into another optimizer",
    violates={RUN},
)
class BoundToAnother(CheckpointManager):
    """The optimizer is rebuilt after the scheduler, which keeps the old one."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, then leave the scheduler with a copy of its optimizer."""
        super().restore_scheduler(scheduler, state)
        stale = copy.copy(scheduler.optimizer)
        stale.param_groups = [dict(group) for group in stale.param_groups]
        scheduler.optimizer = stale


@mutant(
    "F02-rates",
    url="Lightning-AI/pytorch-lightning#12812",
    change="after the load each group has the rate that the scheduler says",
    violates={GROUPS, "CKC-RSUM-007"},
)
class RatesOfTheScheduler(CheckpointManager):
    """Right wherever nothing but the schedule sets a rate."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, then write the rates into the groups."""
        super().restore_scheduler(scheduler, state)
        rates = scheduler.get_last_lr()
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@mutant(
    "F03",
    url="Lightning-AI/pytorch-lightning#11188",
    change="the scheduler is left to a backend that does not know of it",
    violates={SCHEDULER, RUN},
)
class LeftToTheBackend(CheckpointManager):
    """The schedule begins anew."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Restore nothing."""


@mutant(
    "F04",
    url="pytorch/pytorch#140900",
    change="keys of a parameter group that a plain optimizer does not have vanish on load",
    violates={GROUPS},
)
class UnknownKeysVanish(CheckpointManager):
    """`initial_lr`, which a scheduler put there, is not in the group after the load."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load the keys that the optimizer's defaults name."""
        super().restore_optimizer(optimizer, state)
        known = {"params", "param_names", *optimizer.defaults}
        for group in optimizer.param_groups:
            for key in set(group) - known:
                del group[key]


@mutant(
    "F05",
    url="NVIDIA/Megatron-LM#7468",
    change="the weight decay of the constructor stays, whatever was saved",
    violates={GROUPS},
)
class StaleDecay(CheckpointManager):
    """The rate is the saved one, the weight decay the constructor's."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:
        """Load, then put the weight decay back."""
        before = [group.get("weight_decay") for group in optimizer.param_groups]
        super().restore_optimizer(optimizer, state)
        for group, decay in zip(optimizer.param_groups, before, strict=True):
            if decay is not None:
                group["weight_decay"] = decay


@mutant(
    "F08",
    url="THUDM/slime#1546",
    change="the position of the scheduler is added to that of the load before",
    violates={"CKC-RSUM-008", "CKC-RSUM-009"},
)
class AddedUp(CheckpointManager):
    """Every load of one manager adds its steps."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load a position that counts all loads."""
        before = vars(self).setdefault("loaded", {}).get(id(scheduler), 0)
        total = vars(self)["loaded"][id(scheduler)] = before + state["last_epoch"]
        super().restore_scheduler(scheduler, {**state, "last_epoch": total})


@mutant(
    "F08-again",
    url="THUDM/slime#1546",
    change="the position of a scheduler that is there already is added to it",
    violates={"CKC-RSUM-009"},
)
class AddedWhereItIsThere(CheckpointManager):
    """Takes a scheduler at the saved position for one that has counted nothing of it."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load a position that is doubled by a second load at once."""
        at = state["last_epoch"]
        total = 2 * at if scheduler.last_epoch == at else at
        super().restore_scheduler(scheduler, {**state, "last_epoch": total})


@mutant(
    "F09",
    url="huggingface/nanotron#256",
    change="the scheduler takes the decayed rate for its initial one",
    violates={SCHEDULER, RUN},
)
class DecayedIsInitial(CheckpointManager):
    """The scheduler is built after the optimizer was loaded."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, then take the rates of the groups as base rates."""
        super().restore_scheduler(scheduler, state)
        scheduler.base_lrs = [group["lr"] for group in scheduler.optimizer.param_groups]


@mutant(
    "F09-counter",
    url="huggingface/nanotron#256",
    change="what is a Counter in a scheduler's state comes back as a plain dict",
    violates={"CKC-COMP-020"},
)
class CounterIsDict(CheckpointManager):
    """The values are equal, and a method is missing."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load what a format without classes keeps."""
        super().restore_scheduler(scheduler, state)
        own = cast("dict[str, object]", vars(scheduler))
        for name, value in own.items():
            if isinstance(value, Counter):
                plain: dict[object, int] = dict(cast("Counter[object]", value))
                setattr(scheduler, name, plain)


@mutant(
    "F09-letters",
    url="huggingface/nanotron#256",
    change="a number as a key in a scheduler's state comes back twice: as it was, and as letters",
    violates={"CKC-COMP-020"},
)
class KeysInLettersToo(CheckpointManager):
    """Names of a flat format are letters, and what has them is added to what the job has."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, and add the keys as a flat format names them."""
        super().restore_scheduler(scheduler, state)
        own = cast("dict[str, object]", vars(scheduler))
        for value in own.values():
            if isinstance(value, Counter):
                held = cast("Counter[object]", value)
                held |= Counter({str(key): count for key, count in held.items()})


@mutant(
    "F09-last-epoch",
    url="huggingface/nanotron#256",
    change="the scheduler is built anew and told its last epoch, and nothing else",
    violates={SCHEDULER, "CKC-RSUM-007"},
)
class LastEpochOnly(CheckpointManager):
    """Right for a schedule that is a function of the step; a sequence of schedules has more."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Set the last epoch, and the callables of a LambdaLR."""
        scheduler.last_epoch = state["last_epoch"]
        for mine, saved in zip(
            getattr(scheduler, "lr_lambdas", ()), state.get("lr_lambdas", ()), strict=True
        ):
            mine.__dict__.update(saved or {})


@mutant(
    "F03-callable",
    url="Lightning-AI/pytorch-lightning#11188",
    change="the state of a callable object inside a LambdaLR is not restored",
    violates={"CKC-RSUM-007"},
)
class CallableIsLeftOut(CheckpointManager):
    """A function has no state, so that of an object is dropped with it."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load all but the callables."""
        if "lr_lambdas" in state:
            state = {**state, "lr_lambdas": [None] * len(state["lr_lambdas"])}
        super().restore_scheduler(scheduler, state)


class _Horizon(CheckpointManager):
    """After a resume a horizon is computed from the steps that are left, as if none were made."""

    field, also = "", ""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load, then lay the horizon out anew."""
        super().restore_scheduler(scheduler, state)
        if hasattr(scheduler, self.field) and hasattr(scheduler, self.also):
            left = getattr(scheduler, self.field) - scheduler.last_epoch
            setattr(scheduler, self.field, left)


@mutant(
    "F06",
    url="thinking-machines-lab/tinker-cookbook#367",
    change="the save at the end of a run names the next epoch, the periodic saves the one trained",
    violates={"CKC-RSUM-011"},
    base="reference-trainer",
)
class FinalCountsOn(Trainer):
    """A run that is extended skips an epoch."""

    until = 0

    def fit(self, job: Any, until: int, save_at: Any, resume: Any, journal: Any) -> None:
        """Know where the run ends."""
        self.until = until
        super().fit(job, until, save_at, resume, journal)

    def checkpoint(self, job: Any, journal: Any) -> None:
        """Save; at the end of the run name the epoch after this one, with this one's last batch."""
        over = job.step == self.until and job.loader.position == len(job.loader)
        job.loader.epoch += over
        super().checkpoint(job, journal)
        job.loader.epoch -= over


@mutant(
    "F07-cosine",
    url="huggingface/transformers#43718",
    change="the horizon of a cosine is computed from the steps that are left",
    violates={"CKC-RSUM-007"},
)
class CosineOfWhatIsLeft(_Horizon):
    """The cosine ends early."""

    field, also = "T_max", "eta_min"


@mutant(
    "F07-linear",
    url="huggingface/transformers#43718",
    change="the horizon of a linear decay is computed from the steps that are left",
    violates={"CKC-RSUM-007"},
)
class RampOfWhatIsLeft(_Horizon):
    """The ramp is steeper than it was."""

    field, also = "total_iters", "end_factor"


@mutant(
    "F07-constant",
    url="huggingface/transformers#43718",
    change="the length of a constant phase is computed from the steps that are left",
    violates={"CKC-RSUM-007"},
)
class PhaseOfWhatIsLeft(_Horizon):
    """The phase ends at another step."""

    field, also = "total_iters", "factor"


@mutant(
    "M01-json",
    url="huggingface/transformers#34631",
    change="to be safe to load, the scheduler's state takes a detour over JSON",
    violates={"CKC-RSUM-007"},
)
class OverJson(CheckpointManager):
    """Milestones are keyed by integers; JSON makes strings of them, and none is ever met."""

    def restore_scheduler(self, scheduler: Any, state: Any) -> None:
        """Load what JSON gives back."""
        super().restore_scheduler(scheduler, json.loads(json.dumps(state)))
