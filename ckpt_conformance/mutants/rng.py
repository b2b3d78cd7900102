"""Generators come back with another state, or with none (bugs E)."""

# ruff: noqa: ANN401  the hooks of a manager take what a job brings: any type at all

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import CheckpointManager, get_rng_state, set_rng_state
from ckpt_conformance.reference_impl.loading import part_of
from ckpt_conformance.reference_impl.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan

PYTHON, NUMPY, TORCH = "CKC-COMP-006", "CKC-COMP-007", "CKC-COMP-008"
RUN = "CKC-RSUM-001"


def _but(state: Mapping[str, Tree], *names: str) -> StateDict:
    """Return the saved state, but the live one of some generators: these stay where they are."""
    live = get_rng_state()
    return {**state, **{name: live[name] for name in names}}


@mutant(
    "E01",
    url="huggingface/transformers#11504",
    change="no generator is restored",
    violates={PYTHON, NUMPY, TORCH, RUN},
)
class NoGenerator(CheckpointManager):
    """Generators are no part of the checkpoint."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore nothing."""


@mutant(
    "E02",
    url="huggingface/transformers#17032",
    change="generators are restored on the mid-epoch path only",
    violates={"CKC-RSUM-003"},
    base="reference-trainer",
)
class MidEpochOnly(Trainer):
    """A resume at the end of an epoch keeps the generators of the new process."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load; between two epochs put the generators back to what they were."""
        before = get_rng_state()
        super().restore(job, resume)
        if job.loader.position % len(job.loader) == 0:
            set_rng_state(before)


@mutant(
    "E03",
    url="huggingface/transformers#21390",
    change="the sampler draws its seed when iteration begins, after the generators were restored",
    violates={TORCH, RUN},
    base="reference-trainer",
)
class SamplerDraws(Trainer):
    """Each iterator costs one draw, and a resume starts one more than the unbroken run."""

    def batches(self, job: Any) -> Iterator[Any]:
        """Draw a seed for each iterator."""
        while True:
            torch.empty((), dtype=torch.int64).random_()
            yield from job.loader


@mutant(
    "E03-first",
    url="huggingface/transformers#21390",
    change="generators are restored before the components, one of which draws as it is loaded",
    violates={"CKC-COMP-018"},
)
class GeneratorsFirst(CheckpointManager):
    """Takes the order of the file for the order of the load."""

    def apply(self, plan: LoadPlan, job: Destinations) -> None:
        """Restore the generators, then the rest."""
        super().restore_rng(plan.extra["rng"])
        super().apply(plan, job)

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Do nothing more at the end."""


@mutant(
    "E03-between",
    url="huggingface/transformers#21390",
    change="generators are restored before the schedulers, one of which draws as it is loaded",
    violates={"CKC-COMP-018"},
)
class GeneratorsBetween(CheckpointManager):
    """Restores what it has in the order of its names, in which schedulers come last."""

    def apply(self, plan: LoadPlan, job: Destinations) -> None:
        """Restore all but the schedulers, then these."""
        super().apply(replace(plan, cold=[*plan.cold, *job.scheduler]), job)
        for component, scheduler in job.scheduler.items():
            if component not in plan.cold:
                self.restore_scheduler(scheduler, part_of(plan.extra["scheduler"], component))


@mutant(
    "E04",
    url="wyim-pgl/transgenic#59",
    change="an epoch's permutation is not saved: it is drawn again, from the restored generator",
    violates={RUN},
    base="reference-trainer",
)
class DrawnAgain(Trainer):
    """A resume in mid-epoch skips the right number of batches of another permutation."""

    def batches(self, job: Any) -> Iterator[Any]:
        """Draw the order of what is about to be read; the draw itself leaves no trace."""
        while True:
            with torch.random.fork_rng(devices=[]):
                drawn = cast("list[int]", torch.randperm(len(job.loader.samples)).tolist())
            size = job.loader.batch
            batches = [drawn[at : at + size] for at in range(0, len(drawn), size)]
            job.loader.order = partial(list[list[int]], batches)
            yield from job.loader


@mutant(
    "E05",
    url="huggingface/accelerate#3960",
    change="an elif chain restores the first generator that was saved, and no other",
    violates={NUMPY, TORCH, RUN, "CKC-MIRR-014"},
)
class FirstOnly(CheckpointManager):
    """The save has if/if/if, the load if/elif/elif."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore the first one."""
        super().restore_rng(_but(state, "numpy", "torch_cpu"))


@mutant(
    "E05-python",
    url="huggingface/accelerate#3960",
    change="the generator of `random` is saved and not restored",
    violates={PYTHON, RUN},
)
class AllButPython(CheckpointManager):
    """Save and load do not handle the same set of generators."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore the others."""
        super().restore_rng(_but(state, "python"))


@mutant(
    "E06",
    url="huggingface/accelerate#4283",
    change="an error while NumPy's generator is restored is swallowed",
    violates={NUMPY, RUN},
)
class ErrorIsSwallowed(CheckpointManager):
    """The state of one generator does not read; the load says that it went well."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore the others."""
        super().restore_rng(_but(state, "numpy"))


@mutant(
    "E08",
    url="modelscope/ms-swift#9935",
    change="the set-up of the data iterator seeds torch after the load",
    violates={TORCH, RUN},
    base="reference-trainer",
)
class SeededAfterLoad(Trainer):
    """Generators are restored, then seeded."""

    def restore(self, job: Any, resume: Any) -> None:
        """Load, then seed."""
        super().restore(job, resume)
        torch.manual_seed(job.seed)


@mutant(
    "E05-gauss",
    url="huggingface/accelerate#3960",
    change="of random's state the words are restored, and not the normal draw that it holds back",
    violates={PYTHON},
)
class WordsAlone(CheckpointManager):
    """Takes the words for the whole state of `random`."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Forget the second of two normal draws."""
        super().restore_rng({**state, "python": {**state["python"], "gauss": None}})


@mutant(
    "E05-cached",
    url="huggingface/accelerate#3960",
    change="of NumPy's state three fields of five are restored",
    violates={NUMPY},
)
class ThreeOfFive(CheckpointManager):
    """Takes name, keys and position for the whole state of NumPy's generator."""

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Forget the second of two normal draws."""
        numpy = {**state["numpy"], "has_gauss": 0, "gauss": 0.0}
        super().restore_rng({**state, "numpy": numpy})
