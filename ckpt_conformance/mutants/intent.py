"""What was asked for is replaced, cast, cut, left out, or dropped (bugs R, J, M, B, E)."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ckpt_conformance.mutants import mutant
from ckpt_conformance.reference_impl import (
    CheckpointDamaged,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointReference,
    LoadResult,
    encode,
    layout,
    loading,
    resolve,
)
from ckpt_conformance.reference_impl.torch_zip import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpt_conformance.reference_impl.encode import StateDict, Tree
    from ckpt_conformance.reference_impl.fill import ReadPlan
    from ckpt_conformance.reference_impl.loading import Destinations, LoadPlan, OpenCheckpoint
    from ckpt_conformance.reference_impl.manifest import Manifest

# -- another step, another checkpoint --------------------------------------------------------------


@mutant(
    "R09",
    url="deepspeedai/DeepSpeed#8499",
    change="without optimizer states the weights are those of the newest step, whatever was asked",
    violates={"CKC-INTN-012"},
)
class TagIgnoredWithoutOptimizer(CheckpointManager):
    """Does not hand the step on in one of its modes."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; without optimizer states, the newest."""
        if any(one.startswith("optimizer") for one in named.get("allow_missing", ())):
            named["step"] = None
        return super().load(*given, **named)


@mutant(
    "R09-family",
    url="deepspeedai/DeepSpeed#8499",
    change="a load without one optimizer leaves all of them cold",
    violates={"CKC-INTN-012"},
)
class NoneOfTheFamily(CheckpointManager):
    """Knows one switch for optimizers."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load; where one optimizer may be missing, load none."""
        if any(one.startswith("optimizer") for one in named.get("allow_missing", ())):
            named["optimizers"], named["allow_missing"] = {}, {"optimizer"}
        return super().load(*given, **named)


@mutant(
    "R09-part",
    url="deepspeedai/DeepSpeed#8499",
    change="the optimizers of an explicit step are read from the newest step",
    violates={"CKC-INTN-001", "CKC-DISC-012", "CKC-IOER-005"},
)
class OptimizerOfTheNewest(CheckpointManager):
    """One inner part follows the pointer, not the request."""

    def open_verified(self, reference: CheckpointReference, allowed: set[str]) -> OpenCheckpoint:
        """Open the step; its optimizers are the newest step's."""
        opened = super().open_verified(reference, allowed)
        newest = super().candidates()[:1]
        with suppress(CheckpointDamaged):
            if newest and newest[0].step != reference.step:
                other = super().open_verified(newest[0], allowed)
                opened.files |= other.files
                opened.documents["optim"] = other.documents["optim"]
        return opened


@mutant(
    "B09-step",
    url="Lightning-AI/pytorch-lightning#7072",
    change="a step that does not exist is a warning, and training starts from scratch",
    violates={"CKC-INTN-002", "CKC-RTRP-020"},
)
class AbsentStepIsAWarning(CheckpointManager):
    """Makes an explicit request optional."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load, or begin anew."""
        try:
            return super().load(*given, **named)
        except CheckpointNotFound:
            if named.get("step") is None or named.get("require_kind"):
                raise
            nothing = CheckpointReference(self.root, 0, "model")
            return LoadResult(0, 0, {}, nothing, [], [])


@mutant(
    "R03-damaged",
    url="safetensors/safetensors#265",
    change="an explicit step that cannot be read is replaced by the newest older one",
    violates={"CKC-INTN-003"},
)
class FallsBackFromAnExplicitStep(CheckpointManager):
    """Treats a request as a preference."""

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: Any = None,  # noqa: ANN401
    ) -> list[CheckpointReference]:
        """The step, then all older ones."""
        candidates = super().candidates(reference, step, require_kind)
        if step is None or not candidates:
            return candidates
        return candidates + [older for older in super().candidates() if older.step < step]


# -- a destination that does not fit ---------------------------------------------------------------


class CopiesIntoTheModel(CheckpointManager):
    """Reads into new memory and leaves the rest to the model's own load_state_dict."""

    def plan_model(self, opened: OpenCheckpoint, model: Any, reads: ReadPlan) -> StateDict:  # noqa: ANN401
        """Plan to read what was saved; the model copies it."""
        saved = opened.documents["model"]
        self.check_model(saved, model.state_dict(), opened.manifest)
        filled: StateDict = encode.replace(saved, TensorRef, lambda _, ref: reads.new(ref))
        return filled


def disguised(saved: Mapping[str, Tree], live: Mapping[str, Tree], *what: str) -> StateDict:
    """Return the saved entries with the dtype or shape of the live ones: a check sees no change."""
    return {
        key: replace(ref, **{one: _given(live[key], one) for one in what})
        if isinstance(ref, TensorRef) and isinstance(live.get(key), torch.Tensor)
        else ref
        for key, ref in saved.items()
    }


def disguised_where(
    saved: Mapping[str, Tree],
    live: Mapping[str, Tree],
    what: str,
    measure: Callable[[TensorRef], object],
) -> StateDict:
    """Return the saved entries, disguised where that leaves what is measured as it was."""
    other = disguised(saved, live, what)

    def chosen(key: str) -> Tree:
        own, ref = saved[key], other[key]
        is_tensor = isinstance(own, TensorRef) and isinstance(ref, TensorRef)
        return ref if is_tensor and measure(ref) == measure(own) else own

    return {key: chosen(key) for key in saved}


def _given(tensor: torch.Tensor, what: str) -> Any:  # noqa: ANN401
    return tuple(tensor.shape) if what == "shape" else tensor.dtype


@mutant(
    "J04",
    url="pytorch/pytorch#187138",
    change="dtypes are not compared, and the copy casts",
    violates={"CKC-INTN-004"},
)
class CastsSilently(CopiesIntoTheModel):
    """Rounds to the dtype of the template."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but dtypes."""
        super().check_model(disguised(saved, live, "dtype"), live, manifest)


@mutant(
    "J04-width",
    url="pytorch/pytorch#187138",
    change="dtypes are compared by the size of an element: bits of one are read as another",
    violates={"CKC-INTN-004"},
)
class ComparesWidths(CheckpointManager):
    """Takes what fits into the memory for what belongs there."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but dtypes of one width."""
        alike = disguised_where(saved, live, "dtype", lambda ref: ref.dtype.itemsize)
        super().check_model(alike, live, manifest)


@mutant(
    "J05",
    url="pytorch/pytorch#126604",
    change="of entries with another shape the overlap is copied",
    violates={"CKC-INTN-005"},
)
class CopiesTheOverlap(CopiesIntoTheModel):
    """Takes a partial read for a success."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but shapes."""
        super().check_model(disguised(saved, live, "shape"), live, manifest)

    def restore_model(self, model: Any, state: StateDict) -> None:  # noqa: ANN401
        """Copy what overlaps."""
        live = model.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape != live[key].shape:
                common = tuple(map(slice, map(min, value.shape, live[key].shape)))
                live[key][common].copy_(value[common])
                state[key] = live[key]
        super().restore_model(model, state)


@mutant(
    "J05-count",
    url="pytorch/pytorch#126604",
    change="shapes are compared by their number of elements: each goes to another place",
    violates={"CKC-INTN-005"},
)
class ComparesCounts(CheckpointManager):
    """Takes what fits into the memory for what belongs there."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but shapes of as many elements."""
        alike = disguised_where(saved, live, "shape", lambda ref: math.prod(ref.shape))
        super().check_model(alike, live, manifest)


@mutant(
    "J05-turned",
    url="pytorch/pytorch#126604",
    change="shapes are compared without the order of their sizes",
    violates={"CKC-INTN-005"},
)
class ComparesSizes(CheckpointManager):
    """Takes a matrix for its transposed one."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but the order of sizes."""
        alike = disguised_where(saved, live, "shape", lambda ref: sorted(ref.shape))
        super().check_model(alike, live, manifest)


@mutant(
    "J06",
    url="pytorch/pytorch#126285",
    change="entries that the checkpoint lacks are passed over: strict is accepted and ignored",
    violates={"CKC-INTN-006"},
)
class StrictIsIgnored(CopiesIntoTheModel):
    """Leaves random weights where nothing was saved."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare what was saved."""
        super().check_model(saved, {key: live[key] for key in live if key in saved}, manifest)

    def restore_model(self, model: Any, state: StateDict) -> None:  # noqa: ANN401
        """Load without strict."""
        model.load_state_dict(state, strict=False)


@mutant(
    "J06-component",
    url="pytorch/pytorch#126285",
    change="components that the checkpoint lacks stay as the job has them, and nothing is said",
    violates={"CKC-INTN-006"},
)
class ComponentsAreOptional(CheckpointManager):
    """Restores what was saved, and looks at nothing else."""

    def check_components(
        self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]
    ) -> list[str]:
        """Let each component of the job be missing."""
        with mock.patch.object(loading, "logger"):
            return super().check_components(opened, job, {*allowed, *job.ids})


@mutant(
    "J06-counter",
    url="pytorch/pytorch#126285",
    change="a counter of batches may be missing, as it is in checkpoints of old releases of torch",
    violates={"CKC-INTN-006"},
)
class CounterIsOptional(CopiesIntoTheModel):
    """Forgives by the end of a name."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare all but such counters that were not saved."""
        needed = {
            key: entry
            for key, entry in live.items()
            if key in saved or not key.endswith("num_batches_tracked")
        }
        super().check_model(saved, needed, manifest)

    def restore_model(self, model: Any, state: StateDict) -> None:  # noqa: ANN401
        """Load without strict; what was needed was compared."""
        model.load_state_dict(state, strict=False)


@mutant(
    "M05-result",
    url="MakazhanAlpamys/Soup#351",
    change="the model is loaded with strict=False and the result is not looked at",
    violates={"CKC-INTN-006", "CKC-INTN-007"},
)
class ResultIsDropped(CopiesIntoTheModel):
    """Matches what it can, and says nothing of the rest."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare what both have."""
        common = saved.keys() & live.keys()
        super().check_model(
            {key: saved[key] for key in common}, {key: live[key] for key in common}, manifest
        )

    def restore_model(self, model: Any, state: StateDict) -> None:  # noqa: ANN401
        """Load without strict."""
        model.load_state_dict(state, strict=False)


@mutant(
    "J01",
    url="pytorch/pytorch#126881",
    change="the plan is made from the model alone: saved entries that it lacks are passed over",
    violates={"CKC-INTN-007"},
)
class PlansFromTheTarget(CheckpointManager):
    """Fills what is there and asks for no more."""

    def check_model(self, saved: Any, live: Any, manifest: Any) -> None:  # noqa: ANN401
        """Compare what the model has."""
        super().check_model({key: saved[key] for key in saved if key in live}, live, manifest)


@mutant(
    "J01-component",
    url="pytorch/pytorch#126881",
    change="a component that was saved and that the job does not have is passed over",
    violates={"CKC-INTN-018"},
)
class PassesOverComponents(CheckpointManager):
    """Loads what the job asks for."""

    def check_components(self, opened: Any, job: Any, allowed: set[str]) -> list[str]:  # noqa: ANN401
        """Compare what the job has."""
        extra = set(opened.manifest.components) - set(job.ids)
        return super().check_components(opened, job, allowed | extra)


# -- another kind, another path --------------------------------------------------------------------


@mutant(
    "R01-kind",
    url="huggingface/diffusers#14769",
    change="a model file of the step is loaded where there is one, although DCP was asked for",
    violates={"CKC-INTN-008"},
)
class PrefersTheModelFile(CheckpointManager):
    """Prefers one format, whatever was asked for."""

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: Any = None,  # noqa: ANN401
    ) -> list[CheckpointReference]:
        """Siblings of kind model first."""
        candidates = super().candidates(reference, step, require_kind)
        if require_kind != "dcp" or reference is not None or not candidates:
            return candidates
        return super().candidates(None, step, "model") or candidates


@mutant(
    "R03",
    url="safetensors/safetensors#265",
    change="a kind that is not there is replaced by the other kind of the step",
    violates={"CKC-INTN-009"},
)
class OtherKindInstead(CheckpointManager):
    """Answers a request for one format with another."""

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: Any = None,  # noqa: ANN401
    ) -> list[CheckpointReference]:
        """The kind, or any."""
        candidates = super().candidates(reference, step, require_kind)
        return candidates or super().candidates(reference, step)


@mutant(
    "B04-path",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="a path of a checkpoint gives the newest checkpoint beside it",
    violates={"CKC-INTN-010"},
)
class PathGivesTheNewest(CheckpointManager):
    """Has a second rule of discovery, for paths."""

    def explicit(self, reference: Any, kind: Any) -> CheckpointReference | Path:  # noqa: ANN401
        """The directory around the path."""
        source = super().explicit(reference, kind)
        return source.root if isinstance(source, CheckpointReference) else source


@mutant(
    "R05",
    url="pytorch/torchtitan#1900",
    change="a source elsewhere is ignored because the run's own folder holds a checkpoint",
    violates={"CKC-INTN-010"},
)
class OwnFolderWins(CheckpointManager):
    """Lets an implicit resume win over an explicit source."""

    def explicit(self, reference: Any, kind: Any) -> CheckpointReference | Path:  # noqa: ANN401
        """The run's own directory, if there is anything in it."""
        source = super().explicit(reference, kind)
        elsewhere = isinstance(source, Path) and source != self.root
        return self.root if elsewhere and resolve.scan(self.root) else source


@mutant(
    "R01-path",
    url="huggingface/diffusers#14769",
    change="the path of a DCP directory gives the model file of its step, where there is one",
    violates={"CKC-INTN-010"},
)
class SiblingOfThePath(CheckpointManager):
    """Prefers one format, whatever path was named."""

    def explicit(self, reference: Any, kind: Any) -> CheckpointReference | Path:  # noqa: ANN401
        """The sibling of kind model."""
        source = super().explicit(reference, kind)
        if isinstance(source, CheckpointReference):
            sibling = CheckpointReference(source.root, source.step, "model")
            return sibling if sibling.path.exists() else source
        return source


# -- what may be absent ----------------------------------------------------------------------------


@mutant(
    "G18-missing-file",
    url="rwth-i6/returnn#1445",
    change="a missing optimizer file is passed over: the optimizer is cold, and nothing says so",
    violates={"CKC-INTN-011", "CKC-DISC-010", "CKC-SHRD-001"},
)
class ColdInSilence(CheckpointManager):
    """Loads the optimizer if its file happens to be there."""

    def may_lack(self, opened: OpenCheckpoint, name: str, allowed: set[str]) -> bool:
        """Whether the file is missing."""
        del allowed
        return name.startswith("optim_") and not (opened.reference.directory / name).exists()

    def check_components(
        self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]
    ) -> list[str]:
        """Pass over optimizers whose file is missing."""
        if opened.absent:
            return list(job.optimizers)
        return super().check_components(opened, job, allowed)


@mutant(
    "R04-kind",
    url="huggingface/transformers#26186",
    change="a manager that saves one kind looks for no other",
    violates={"CKC-INTN-013", "CKC-EMRG-001"},
)
class KnowsOneFormat(CheckpointManager):
    """Takes the kind that it saves for the only one there is."""

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: layout.Kind | None = None,
    ) -> list[CheckpointReference]:
        """Checkpoints of its own kind."""
        own: layout.Kind = "dcp" if self.use_dcp else "model"
        return super().candidates(reference, step, require_kind or (None if reference else own))


@mutant(
    "E10",
    url="NVIDIA-NeMo/Megatron-Bridge#4893",
    change="what is restored follows from how saves are set up: of the other kind no generators",
    violates={"CKC-INTN-013"},
)
class TemplateOfTheSaves(CheckpointManager):
    """The template of the load is built from the options of the new run's saves."""

    own = True

    def plan(self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]) -> LoadPlan:
        """Note whether this manager would have saved it so."""
        self.own = (opened.reference.kind == "dcp") == self.use_dcp
        return super().plan(opened, job, allowed)

    def restore_rng(self, state: Mapping[str, Tree]) -> None:
        """Restore what this manager saves."""
        if self.own:
            super().restore_rng(state)


@mutant(
    "R09-kept",
    url="deepspeedai/DeepSpeed#8499",
    change="the schedulers of the first load are kept by the manager and given with each later one",
    violates={"CKC-INTN-001", "CKC-RTRP-020"},
)
class KeepsTheFirstSchedulers(CheckpointManager):
    """Reads a small file once."""

    first: Any = None

    def plan(self, opened: OpenCheckpoint, job: Destinations, allowed: set[str]) -> LoadPlan:
        """Plan a load; the schedulers are those of the first."""
        plan = super().plan(opened, job, allowed)
        if self.first is None:
            self.first = plan.extra["scheduler"]
        plan.extra["scheduler"] = self.first
        return plan


@mutant(
    "R06-zero",
    url="allenai/open-instruct#1823",
    change="step 0 is taken for no step: the latest is served",
    violates={"CKC-INTN-001"},
)
class ZeroIsNone(CheckpointManager):
    """Asks whether a step is true."""

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load the step, if there is any."""
        named["step"] = named.get("step") or None
        return super().load(*given, **named)


@mutant(
    "R03-path",
    url="safetensors/safetensors#265",
    change="a path of a checkpoint that cannot be read is replaced by an older one beside it",
    violates={"CKC-INTN-010"},
)
class FallsBackFromAPath(CheckpointManager):
    """Treats a path as a preference."""

    def candidates(
        self,
        reference: Any = None,  # noqa: ANN401
        step: int | None = None,
        require_kind: Any = None,  # noqa: ANN401
    ) -> list[CheckpointReference]:
        """The path, then all older ones."""
        candidates = super().candidates(reference, step, require_kind)
        if reference is None or not candidates:
            return candidates
        named = candidates[0]
        beside = sorted(resolve.references(named.root), key=resolve.preference)
        return candidates + [older for older in beside if older.step < named.step]


@mutant(
    "B02-renamed",
    url="NVIDIA-NeMo/Megatron-Bridge#3267",
    base="reference-dcp",
    change="the step of a directory is its name's, whatever its content says",
    violates={"CKC-CORR-003"},
)
class NameIsTheStep(CheckpointManager):
    """Does not ask a manifest which step it is of."""

    def read_manifest(self, reference: CheckpointReference) -> Manifest:
        """Read it, and take the step that was expected for its own."""
        with mock.patch.object(resolve, "check_identity", return_value=None):
            return replace(super().read_manifest(reference), step=reference.step)


@mutant(
    "B04-slash",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    base="reference-dcp",
    change="a path with a trailing slash is a parent: the newest checkpoint around it is served",
    violates={"CKC-INTN-010"},
)
class TrailingSlashIsAParent(CheckpointManager):
    """Takes the text before the last slash for the directory."""

    def explicit(self, reference: Any, kind: Any) -> CheckpointReference | Path:  # noqa: ANN401
        """What the path names; with a slash at its end, what is around it."""
        source = super().explicit(reference, kind)
        is_parent = isinstance(reference, str) and reference.endswith("/")
        return source.root if is_parent and isinstance(source, CheckpointReference) else source


@mutant(
    "B13-path",
    url="mosaicml/composer#1037",
    change="a relative path means a name below the root, where there is one",
    violates={"CKC-INTN-010"},
)
class RelativeToTheRoot(CheckpointManager):
    """Takes what a user names for what it has itself."""

    def explicit(self, reference: Any, kind: Any) -> CheckpointReference | Path:  # noqa: ANN401
        """What the path names below the root; else what it names."""
        own = self.root / Path(reference)
        return super().explicit(own if own.exists() else reference, kind)


@mutant(
    "S04-apart",
    url="EvolvingLMMs-Lab/lmms-engine#157",
    change="which tensors of the job share memory is not compared: the last one that is read wins",
    violates={"CKC-INTN-016"},
)
class TiesAreNotCompared(CheckpointManager):
    """Takes any ties for right."""

    def check_model(
        self, saved: Mapping[str, Tree], live: Mapping[str, Tree], manifest: Manifest
    ) -> None:
        """Compare all but the ties."""
        super().check_model(saved, live, replace(manifest, ties=self.live_ties(live)))


@mutant(
    "S04-state",
    url="EvolvingLMMs-Lab/lmms-engine#157",
    change="optimizer state is read into the memory that is there, also where parameters share it",
    violates={"CKC-INTN-016"},
)
class FillsSharedState(CheckpointManager):
    """Saves an allocation; of what shares memory, the last that is read wins."""

    def restore_optimizer(self, optimizer: Any, state: Any) -> None:  # noqa: ANN401
        """Load; what was one tensor before is one again."""
        places: dict[int, list[tuple[Any, str]]] = {}
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.numel():
                    places.setdefault(value.data_ptr(), []).append((parameter, key))
        super().restore_optimizer(optimizer, state)
        for *others, (parameter, key) in places.values():
            for other, its_key in others:
                optimizer.state[other][its_key] = optimizer.state[parameter][key]


@mutant(
    "B04-name",
    url="NVIDIA-NeMo/Megatron-Bridge#5964",
    change="a directory is a checkpoint by its name alone: a copy under another one is a parent",
    violates={"CKC-INTN-017"},
    base="reference-dcp",
)
class KnowsItsOwnNamesAlone(CheckpointManager):
    """Looks for steps in what is one."""

    any_name = staticmethod(resolve.explicit_reference)

    def load(self, *given: Any, **named: Any) -> LoadResult:  # noqa: ANN401
        """Load what paths name by a name of this manager's."""
        with mock.patch.object(resolve, "explicit_reference", self.own_names):
            return super().load(*given, **named)

    def own_names(self, path: Path) -> CheckpointReference | None:
        """Take a directory of a foreign name for a parent."""
        is_foreign = path.is_dir() and layout.directory_step(path.name) is None
        return None if is_foreign else self.any_name(path)
