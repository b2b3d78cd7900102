"""What a session was asked for: one frozen object, wherever the request came from.

`run_session` hands it over as it is, a user's own pytest command line is parsed into it once, and
pytest-xdist's workers get it as plain data. Nothing of it imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpt_conformance.contract.verdicts import CheckOutcome


@dataclass(frozen=True)
class CheckOptions:
    """What checks depend on, in plain values."""

    adapters: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # ids of invariants
    claims: tuple[str, ...] = ()  # profiles whose practice is made a MUST
    budget: str = "quick"
    order: str = ""  # the turns of tasks, where a check tries several; see `contract.orders`
    deadline: float = 60.0  # seconds that one child may take
    seed: int = 0
    device: str = "cpu"  # where ranks compute
    catalogue: int | None = None  # version of the invariants; None: the newest
    server: str = ""  # socket of a running fork server; empty: the session starts its own
    out: Path | None = None  # folder of the certificate: bundles of violations are kept below it
    # Check -> the adapters that it runs on; None: every chosen check on every adapter.
    selection: Mapping[str, tuple[str, ...]] | None = None
    written_by: tuple[str, ...] = ()  # folders of `ckpt-conformance write`, of other releases
    pretends: bool = False  # another release is pretended instead: for managers broken on purpose
    # A package: which of its functions each check enters is noted in the check's report.
    reach: str = ""
    statements: bool = False  # and which of their statements

    def to_plain(self) -> dict[str, Any]:
        """Turn them into values that xdist sends to a worker, where `options_of` reads them."""
        values = {field.name: getattr(self, field.name) for field in fields(CheckOptions)}
        return values | {"out": None if self.out is None else str(self.out)}

    @classmethod
    def from_plain(cls, values: object) -> Self:
        """Read what `to_plain` gave; raises msgspec.ValidationError for anything else."""
        return msgspec.convert(values, cls, dec_hook=lambda kind, value: kind(value))


@dataclass(frozen=True)
class SessionOptions(CheckOptions):
    """What to run, and how. `jobs` is the number of worker processes; 1 stays in this one."""

    jobs: int = 1
    scratch: Path | None = None  # holds what a run leaves; None: a folder that goes away with it
    on_progress: Callable[[int, int, CheckOutcome | None], None] | None = None


OPTIONS: pytest.StashKey[CheckOptions] = pytest.StashKey()  # on the configuration of a session
SENT = "ckpt_options"  # the key of a worker's input


def options_of(config: pytest.Config) -> CheckOptions:
    """Look up the options of a session: handed over, sent to this worker, or parsed once."""
    if OPTIONS not in config.stash:
        sent = getattr(config, "workerinput", {}).get(SENT)
        config.stash[OPTIONS] = _parsed(config) if sent is None else CheckOptions.from_plain(sent)
    return config.stash[OPTIONS]


def _parsed(config: pytest.Config) -> CheckOptions:
    """Take the options of a user's own pytest command line and configuration file."""
    given = config.option
    return CheckOptions(
        adapters=tuple(given.ckpt_adapter or config.getini("ckpt_adapters")),
        profiles=tuple(given.ckpt_profile),
        only=tuple(given.ckpt_only),
        claims=tuple(given.ckpt_claim),
        budget=given.ckpt_budget,
        order=given.ckpt_order,
        deadline=given.ckpt_deadline,
        seed=given.ckpt_seed,
        device=given.ckpt_device,
        catalogue=given.ckpt_catalogue,
        server=given.ckpt_server or "",
        out=Path(given.ckpt_bundles) if given.ckpt_bundles else None,
        written_by=tuple(given.ckpt_written_by),
    )


def add_options(parser: pytest.Parser) -> None:
    """Add the options; every one is prefixed, so that it can't meet another plugin's."""
    group = parser.getgroup("ckpt_conformance", "conformance of training checkpoint managers")
    add = group.addoption
    for name, what, text in (
        ("adapter", "NAME", "adapter: a bundled name or module:attr"),
        ("profile", "P", "only invariants of this profile, and CKC-SMOK-001"),
        ("claim", "P", "make the practice of this profile a MUST"),
        ("only", "ID", "only this invariant"),
        ("written-by", "DIR", "load what another release of torch wrote there"),
    ):
        help_text = f"{text} (repeatable)"
        add(f"--ckpt-{name}", help=help_text, action="append", default=[], metavar=what)
    add(
        "--ckpt-budget", choices=("quick", "full"), default="quick", help="how much a check samples"
    )
    add(
        "--ckpt-order",
        default="",
        metavar="LINE",
        help="try this order of turns alone, such as 'A136 B1': the line of a violation",
    )
    add(
        "--ckpt-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of every choice; the same seed gives the same run",
    )
    add(
        "--ckpt-catalogue",
        type=int,
        default=None,
        metavar="N",
        help="pin the version of the catalogue of invariants",
    )
    add(
        "--ckpt-deadline",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds that one child may take before it counts as a hang",
    )
    add(
        "--ckpt-device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where ranks compute; cuda: NCCL, and a GPU for each rank",
    )
    add("--ckpt-server", default=None, metavar="SOCKET", help="use a running fork server")
    add(
        "--ckpt-bundles",
        default=None,
        metavar="DIR",
        help="keep a bundle of each violation below DIR",
    )
    parser.addini(
        "ckpt_adapters",
        "adapters to certify when --ckpt-adapter is not given",
        type="args",
        default=[],
    )
