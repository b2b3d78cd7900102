"""A training checkpoint manager, written to be read: correct, short, and standing alone."""

from ckpt_conformance.reference_impl.background import SaveHandle
from ckpt_conformance.reference_impl.config import patch_missing_config_keys
from ckpt_conformance.reference_impl.errors import (
    BackgroundSaveFailed,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    DumpElsewhere,
    ExpertsChanged,
    Failure,
    RankFailed,
    RankLost,
    SaveRefused,
    WriterDied,
    WriterFailed,
)
from ckpt_conformance.reference_impl.evaluation import load_model
from ckpt_conformance.reference_impl.fencing import WriterFenced
from ckpt_conformance.reference_impl.layout import CheckpointReference, Refusal
from ckpt_conformance.reference_impl.loading import LoadResult, ReshardReport
from ckpt_conformance.reference_impl.manager import CheckpointManager
from ckpt_conformance.reference_impl.mirror import DirectoryMirror, Mirror, MirrorError
from ckpt_conformance.reference_impl.rehydrate import (
    Exported,
    Imported,
    export_model,
    import_unverified,
    rehydrate,
)
from ckpt_conformance.reference_impl.resolve import (
    find_local_checkpoint_steps,
    resolve_checkpoint_reference,
)
from ckpt_conformance.reference_impl.termination import Termination
from ckpt_conformance.reference_impl.train_state import (
    Stateful,
    build_train_state,
    get_rng_state,
    restore_train_state,
    set_rng_state,
)
from ckpt_conformance.reference_impl.url_mirror import Retries, UrlMirror, mirror_at

__all__ = [
    "BackgroundSaveFailed",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointReference",
    "DirectoryMirror",
    "DumpElsewhere",
    "ExpertsChanged",
    "Exported",
    "Failure",
    "Imported",
    "LoadResult",
    "Mirror",
    "MirrorError",
    "RankFailed",
    "RankLost",
    "Refusal",
    "ReshardReport",
    "Retries",
    "SaveHandle",
    "SaveRefused",
    "Stateful",
    "Termination",
    "UrlMirror",
    "WriterDied",
    "WriterFailed",
    "WriterFenced",
    "build_train_state",
    "export_model",
    "find_local_checkpoint_steps",
    "get_rng_state",
    "import_unverified",
    "load_model",
    "mirror_at",
    "patch_missing_config_keys",
    "rehydrate",
    "resolve_checkpoint_reference",
    "restore_train_state",
    "set_rng_state",
]
