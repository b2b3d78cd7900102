"""The persistence models by name, from the one that promises most to the one that does least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_conformance.crash.model.btrfs import Btrfs
from ckpt_conformance.crash.model.ext4 import Ext4
from ckpt_conformance.crash.model.kill import Kill
from ckpt_conformance.crash.model.nfs import Nfs
from ckpt_conformance.crash.model.node_loss import NodeLoss
from ckpt_conformance.crash.model.posix import Posix
from ckpt_conformance.crash.model.ranks import Ranks
from ckpt_conformance.crash.model.xfs import Xfs

if TYPE_CHECKING:
    from ckpt_conformance.crash.model.states import Model

_ALL = (Kill(), Ranks(), Nfs(), NodeLoss(), Ext4(), Xfs(), Btrfs(), Posix())
MODELS: dict[str, Model] = {model.name: model for model in _ALL}
OF_RANKS = ("ranks", "nfs", "node-loss")  # only of a recording of several ranks
