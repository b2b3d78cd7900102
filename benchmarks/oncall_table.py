"""The on-call table of docs/fsck.md: for each layout and each fault, what fsck says.

python benchmarks/oncall_table.py [--write docs/fsck.md] [--seeds N] [--only LAYOUT]

Each cell is N draws of `ckpt-conformance drill` (seeds 0 to N - 1) on a run that the library wrote.
The columns of roles and of older steps are swaps and stale files, of which N are drawn where there
are more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed import checkpoint as dcp

REPOSITORY = Path(__file__).parent.parent
TESTS = REPOSITORY / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "fsck")]

import fsck_corpus  # noqa: E402  of the tests
import fsck_swaps  # noqa: E402  as above

from ckpt_conformance.cli.disk import drills  # noqa: E402
from ckpt_conformance.fault_injectors.drills import FAULTS  # noqa: E402
from ckpt_conformance.fsck.judge.judge import Options, judge  # noqa: E402
from ckpt_conformance.fsck.layouts.step_names import step_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GOLDEN = TESTS / "golden"
BEGIN = "<!-- begin of the on-call table: `make docs-oncall` writes it -->"
END = "<!-- end of the on-call table -->"
ROLES, STALE = "swapped role", "older step"
COLUMNS = (*FAULTS, ROLES, STALE)
SEEDS = 8
NONE = "-"


# -- layouts ---------------------------------------------------------------------------------------


def _steps(write: Callable[[Path, int], None]) -> Callable[[Path], Path]:
    """Write two steps of a run, each with other values."""

    def run(root: Path) -> Path:
        for step in (5, 10):
            torch.manual_seed(step)
            write(root, step)
        return root

    return run


def _values(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 8))
    return {name: one.detach() for name, one in model.state_dict().items()}


def _torch(root: Path, step: int) -> None:
    torch.save({"model": _values(step), "step": step}, root / f"checkpoint-{step}.pt")


def _dcp(root: Path, step: int) -> None:
    dcp.save({"model": _values(step), "step": step}, checkpoint_id=root / f"step_{step}")


def _safetensors(root: Path, step: int) -> None:
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    fsck_corpus.save_file(_values(step), folder / "model.safetensors")


def _hf_index(root: Path, step: int) -> None:
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    fsck_corpus.two_shards(folder, _values(step), 2)


def _golden(where: str) -> Callable[[Path], Path]:
    def copy(root: Path) -> Path:
        shutil.copytree(GOLDEN / where, root, dirs_exist_ok=True)
        return root

    return copy


def _snapshots(root: Path) -> Path:
    for step in ("step_1", "step_2"):
        shutil.copytree(GOLDEN / "fsck" / "torchsnapshot" / step, root / step)
    return root


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "torch.save, a file a step": _steps(_torch),
    "torch.save, a file a part": lambda root: fsck_swaps.script(root, (10, 20, 30)),
    "DCP": _steps(_dcp),
    "DCP, 4 ranks": fsck_corpus.dcp_ranks,
    "safetensors": _steps(_safetensors),
    "Hugging Face, index": _steps(_hf_index),
    "accelerate": _golden("fsck/accelerate_run/checkpoints"),
    "Trainer": _golden("fsck/transformers_run/run"),
    "Lightning": _golden("fsck/lightning/run"),
    "DeepSpeed ZeRO 1": _golden("fsck/deepspeed_run/run"),
    "verl FSDP": _golden("fsck/fsdp_run/run"),
    "Orbax, OCDBT": _golden("fsck/orbax/manager"),
    "Orbax, Zarr 3": _golden("fsck/orbax/zarr3"),
    "torchsnapshot": _snapshots,
    "reference, per rank": fsck_corpus.reference,
    "reference, per rank, 2 ranks": _golden("ranks-schema-2/model"),
    "reference, DCP": fsck_corpus.reference_dcp,
    "reference, DCP, 2 ranks": _golden("ranks-schema-2/dcp"),
}
"""Each layout, and what writes a run of it into an empty folder."""


def written(layout: str, base: Path) -> Path:
    """Write a run of a layout below a folder."""
    root = base / re.sub(r"\W+", "-", layout) / "run"
    root.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LAYOUTS[layout](root)


# -- cells -----------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What fsck said of some draws: it is not whole; whole with a remark; whole."""

    caught: int = 0
    remarked: int = 0
    missed: int = 0

    @property
    def drawn(self) -> int:
        """How many there were."""
        return sum(self)

    def __str__(self) -> str:
        """Write `7/8` or `5/8 r2`; a dash where the fault is impossible."""
        remarks = f" r{self.remarked}" if self.remarked else ""
        return f"{self.caught}/{self.drawn}{remarks}" if self.drawn else NONE

    @classmethod
    def read(cls, text: str) -> Cell:
        """Read what `str` wrote; raises ValueError."""
        if text == NONE:
            return cls()
        match = re.fullmatch(r"(\d+)/(\d+)(?: r(\d+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no cell of the on-call table")
        caught, drawn, remarked = int(match[1]), int(match[2]), int(match[3] or 0)
        return cls(caught, remarked, drawn - caught - remarked)

    @classmethod
    def of(cls, said: Sequence[str]) -> Cell:
        """Count what fsck said of each draw: a state, or `remark`; IMPOSSIBLE counts as no draw."""
        counts = Counter(said)
        whole, remarked = counts.pop("whole", 0), counts.pop(drills.REMARK, 0)
        counts.pop(drills.IMPOSSIBLE, 0)
        return cls(counts.total(), remarked, whole)


def cell(run: Path, column: str, seeds: Sequence[int], folder: Path) -> Cell:
    """Draw a fault by some seeds in copies of a run; the run stays as it is."""
    if column in FAULTS:
        options = Options()
        drill = drills.Drill(run, judge(run, options), options)
        return Cell.of([drills.drilled(drill, folder, column, seed).says for seed in seeds])
    trials = [one for one in _trials(run, column) if not fsck_swaps.same(one)]
    rng = random.Random(column)  # noqa: S311  a drill
    if len(trials) > len(seeds):
        trials = rng.sample(trials, len(seeds))
    said = Counter(fsck_swaps.seen(run, one) for one in trials)
    seen = fsck_swaps.Seen
    return Cell(said[seen.DAMAGED], said[seen.REMARKED], said[seen.SILENT])


def _trials(run: Path, column: str) -> Iterator[fsck_swaps.Trial]:
    """Yield every swap of files of different roles, or every file of an older step."""
    if column == ROLES:
        yield from (one for one in fsck_swaps.swaps(run) if one.what == "of different roles")
        return
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    for new, old in itertools.permutations(files, 2):
        steps = [_step(path.relative_to(run)) for path in (old, new)]
        is_older = None not in steps and steps[0] < steps[1]  # type: ignore[operator]
        if is_older and _bare(new, run) == _bare(old, run):
            yield fsck_swaps.Trial("an older one", ((old, new),))


def _step(path: Path) -> int | None:
    return next((step for step in map(step_of, path.parts) if step is not None), None)


def _bare(path: Path, run: Path) -> str:
    """Return a path without its step."""
    step = _step(path.relative_to(run))
    return re.sub(rf"0*{step}(?=\D|$)", "#", path.relative_to(run).as_posix(), count=1)


# -- the table -------------------------------------------------------------------------------------


def rows(only: Sequence[str], seeds: Sequence[int], base: Path) -> Iterator[str]:
    """Yield the table line by line."""
    yield f"| layout | {' | '.join(COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for layout in only:
        run = written(layout, base)
        cells = [str(cell(run, column, seeds, base)) for column in COLUMNS]
        yield f"| {layout} | {' | '.join(cells)} |"


def read(text: str) -> dict[tuple[str, str], Cell]:
    """Read the table of a page: cells by layout and fault; raises ValueError."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    if not lines:
        raise ValueError("the page has no on-call table: make docs-oncall")
    head, _, *others = ([one.strip() for one in line.strip("|").split("|")] for line in lines)
    return {
        (layout, column): Cell.read(one)
        for layout, *cells in others
        for column, one in zip(head[1:], cells, strict=True)
    }


def _head(seeds: int) -> str:
    return (
        f"Drawn with torch {importlib.metadata.version('torch').partition('+')[0]}, {seeds} draws "
        f"a cell (`--seed` 0 to {seeds - 1}; fewer swaps where there are fewer). "
        "`7/8`: of 8 draws 7 are not whole; "
        "`r1`: one more is a remark; what is left is not seen; `-`: there is nothing to draw."
    )


def main() -> None:
    """Write the table, or put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page that has the table")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws of each cell")
    parser.add_argument(
        "--only", action="append", choices=LAYOUTS, help="a layout; may be repeated"
    )
    asked = parser.parse_args()
    lines = [_head(asked.seeds), ""]
    with tempfile.TemporaryDirectory() as base:
        for line in rows(asked.only or list(LAYOUTS), range(asked.seeds), Path(base)):
            print(line, flush=True)
            lines.append(line)
    if asked.write:
        page = asked.write.read_text(encoding="utf-8")
        before, begin, rest = page.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            sys.exit(f"error: {asked.write} has no place for the table: {BEGIN} ... {END}")
        table = "\n".join([begin, *lines, end])
        asked.write.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
