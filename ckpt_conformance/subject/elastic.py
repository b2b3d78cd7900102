"""The same programs under torchrun: its agent starts the ranks, and starts them again.

`launch` runs on the harness's side; `main` is what torchrun starts as each rank. A rank takes the
program of the attempt that it is: the first one is hit, the next ones resume.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ckpt_conformance.harness import messages
from ckpt_conformance.harness.client import FIXED_MACHINE, process_result
from ckpt_conformance.harness.messages import Ended, Program
from ckpt_conformance.processes import lifecycle
from ckpt_conformance.subject import worlds
from ckpt_conformance.subject.subject import JOB_SEED, OTHER_SEED
from ckpt_conformance.workload import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpt_conformance.harness.client import ProcessResult
    from ckpt_conformance.harness.messages import AnyOp
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.subject.worlds import WorldResult

DEADLINE = 120.0  # seconds for all attempts: each starts a new interpreter for every rank


def launch(
    subject: Subject, layout: Mapping[str, int], attempts: Sequence[Sequence[AnyOp]]
) -> list[WorldResult]:
    """Run the operations of each attempt under torchrun; give how the ranks of each ended.

    An attempt that was not reached has ranks that did nothing. Whatever is left of torchrun at the
    deadline is killed, with all that it started.
    """
    size, folder = worlds.size_of(layout), subject.scratch / "elastic"
    folder.mkdir()
    programs = [_programs(subject, layout, folder, at, ops) for at, ops in enumerate(attempts)]
    (folder / "attempts").write_bytes(messages.encode(programs))
    code, output = _torchrun(size, len(attempts) - 1, folder)
    return [
        worlds.WorldResult(
            tuple(_process_result(program, code, output) for program in ranks), ranks[0]
        )
        for ranks in programs
    ]


def _programs(
    subject: Subject,
    layout: Mapping[str, int],
    folder: Path,
    attempt: int,
    ops: Sequence[AnyOp],
) -> list[Program]:
    given: dict[str, Any] = {"seed": JOB_SEED if attempt == 0 else OTHER_SEED}
    made = worlds.programs(subject, layout, ops, given)
    own = ("journal", "result", "output")
    named = [
        {name: str(folder / f"{name}-{attempt}-{at}") for name in own} for at in range(len(made))
    ]
    return [structs.replace(program, **names) for program, names in zip(made, named, strict=True)]


def began(result: WorldResult) -> bool:
    """Return whether every rank of an attempt came as far as its journal."""
    return all(Path(rank.program.journal).exists() for rank in result.ranks)


def _torchrun(size: int, restarts: int, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--standalone"]
    command += ["--nproc-per-node", str(size), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1"]
    command += ["-m", "ckpt_conformance.subject.elastic", str(folder / "attempts")]
    (folder / "tmp").mkdir()
    environment = os.environ | FIXED_MACHINE | {"TMPDIR": str(folder / "tmp")}
    environment |= devices.hidden(os.environ)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(  # noqa: S603  our own module
            command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=folder
        )
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        finally:
            end_all(process)
        log.seek(0)
        return code, log.read()[-4000:]


def end_all(process: subprocess.Popen[Any]) -> None:
    """Kill torchrun and every process below it, and reap it; ranks have sessions of their own."""
    if process.returncode is None:  # nothing below one that has ended can be found
        lifecycle.kill_tree(process.pid)
    process.wait()


def _process_result(program: Program, code: int, output: str) -> ProcessResult:
    """Read what a rank left; torchrun alone knows how it ended, and tells only its own exit."""
    hang = code == -signal.SIGALRM
    ended = Ended(code=-signal.SIGKILL, hang=hang, seconds=0.0, cpu=0.0, left=[])
    return replace(process_result(program, ended), output=output, code=code)


def main() -> None:
    """Be one rank of one attempt: run by `-m` with ATTEMPTS, under torchrun."""
    attempts = messages.decode(Path(sys.argv[1]).read_bytes(), list[list[Program]])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    program = attempts[attempt][int(os.environ["RANK"])]
    if program.device == devices.CUDA:
        devices.show()
    from ckpt_conformance.harness import child

    child.run_program(program)
    report = messages.decode(Path(program.result).read_bytes(), messages.Report)
    failed = any(result.error for result in report.results)
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # what torch and the manager left running ends here


if __name__ == "__main__":
    main()
