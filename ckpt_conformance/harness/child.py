"""One child process: what it does from birth to its end or its death.

A child runs a program: plain JSON, so that it can be sent to the server, kept in a bundle and run
again alone. Keys: adapter, root, journal, result, job {kind, seed, variant, layout}, options, ops,
memory, snapshots, world {rank, size, store, timeout} (one rank of several), rank (which is said in
every event of the journal), rank_group (programs of ranks: this child forks one process for each).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckpt_conformance.contract import OpenOptions, registry, trees
from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.harness import rank_group
from ckpt_conformance.harness.gate import Gate
from ckpt_conformance.trace import sources
from ckpt_conformance.workload import devices
from ckpt_conformance.workload.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY = 4 << 30  # bytes above the child's baseline
SHARDED = "sharded"  # the kind of job that ranks share


class Stopped(BaseException):
    """Ends a framework's loop from inside a loss call; no framework catches it as its own."""


class Child:
    """The state of a running child, and its operations: each method `op_<name>` is one."""

    def __init__(self, program: dict[str, Any]) -> None:
        """Seed the job, open the journal; the manager opens when an operation needs it."""
        self.program = program
        self.root = Path(program["root"])
        self.adapter = registry.get(program["adapter"])
        self.journal = ChildJournal(Path(program["journal"]), program.get("rank"))
        self.gate = Gate()
        self.faults: list[Any] = []
        self.payload_samples: dict[str, Any] = {}
        self.job = self.new_job(program["job"])
        self._opened: Any = None
        self.journal.on_acknowledged = self._acknowledged

    def new_job(self, spec: dict[str, Any]) -> Any:  # noqa: ANN401  Job | ShardedJob
        """Build a job whose records go to the journal."""
        if spec["kind"] == SHARDED:
            job: Any = ranks().job(spec)
        else:
            job = Job(spec["kind"], spec["seed"], variant=spec.get("variant", ""))
        job.on_record = self.journal.record
        return job

    @property
    def opened(self) -> Any:  # noqa: ANN401  Manager | Trainer
        """The live manager or trainer; opened once."""
        if self._opened is None:
            given = self.program.get("options", {})
            mirror = Path(given["mirror"]) if given.get("mirror") else None
            options = OpenOptions(
                given.get("keep_last"), mirror, self.gate.pass_through, given.get("kind")
            )
            self._opened = self.adapter.open(self.root, options)
        return self._opened

    def run(self) -> list[dict[str, Any]]:
        """Run every operation until one raises; an op with `continue` goes on after an error."""
        results: list[dict[str, Any]] = []
        for op in self.program["ops"]:
            results.append(self.run_one(op))
            if "error" in results[-1] and not op.get("continue"):
                break
        return results

    def run_one(self, op: dict[str, Any]) -> dict[str, Any]:
        """Run one operation and give its value or its error."""
        result: dict[str, Any] = {"op": op["op"]}
        try:
            getattr(self, f"op_{op['op']}")(op, result)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  DCP's is no Exception; all is to be seen
            result["error"] = self.describe(error)
            self.disarm()
        return result

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Describe an exception in plain values."""
        kind = type(error)
        refusals: tuple[type[BaseException], ...] = getattr(self.adapter, "refusals", ())
        typed = isinstance(error, tuple(refusals))
        memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        lines = str(error).strip().splitlines() or [""]
        message = lines[0][:250] + (f" ... {lines[-1][-240:]}" if len(lines) > 1 else "")
        return {
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "message": message,
            "typed": typed,
            "memory": memory,
            "disk": any(isinstance(one, OSError) for one in chain(error)),
            "where": where,
            "errno": getattr(error, "errno", None),
        }

    # -- faults ---------------------------------------------------------------------------------

    def arm(self, specs: list[dict[str, Any]]) -> None:
        """Install fault injectors; each spec names `module:Class` and its arguments."""
        for spec in specs:
            module, _, name = spec["injector"].partition(":")
            injector = getattr(importlib.import_module(module), name)(
                root=self.root, journal=self.journal, **spec.get("args", {})
            )
            injector.install()
            self.faults.append(injector)

    def disarm(self) -> list[dict[str, Any]]:
        """Remove every injector, last first, and say how often each was called and fired."""
        counts: list[dict[str, Any]] = []
        while self.faults:
            injector = self.faults.pop()
            injector.remove()
            counts.append(
                {
                    "name": getattr(injector, "name", ""),
                    "calls": injector.calls,
                    "fired": injector.fired,
                    "log": injector.log,
                    "unsupported": getattr(injector, "unsupported", []),
                }
            )
        return counts

    def _acknowledged(self, step: int) -> None:
        if not self.program.get("snapshots"):
            return
        world = self.program.get("world", {"rank": 0, "size": 1})
        if world["size"] > 1:
            ranks().together()  # acknowledged is what every rank has acknowledged
        self.payload_samples[str(step)] = self.job.payload_samples()
        if world["rank"] == 0:
            trees.copy(self.root, Path(self.program["snapshots"]) / str(step))
        if world["size"] > 1:
            ranks().together()

    # -- operations -------------------------------------------------------------------------------

    def op_run(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Train to a step with saves, by the harness's loop or by the framework's."""
        states: dict[str, Any] = {}
        result["states"] = states
        self.job.on_loss = self._watcher(op, states, result)
        specs, at = op.get("faults", []), op.get("fault_step")
        if at is None:
            self.arm(specs)
        else:
            self.journal.on_begun = lambda step: self.arm(specs) if step == at else None
        first = len(self.journal.records)
        try:
            (self._fit if self.adapter.shape == "trainer" else self._loop)(op)
        except Stopped:
            pass
        finally:
            result["faults"] = self.disarm()
            self.journal.on_begun = lambda _: None
            result["records"] = [vars(record) for record in self.journal.records[first:]]
            result["step"] = self.job.step
        if op.get("final"):
            result["final"] = self.job.leaves()

    def _watcher(
        self, op: dict[str, Any], states: dict[str, Any], result: dict[str, Any]
    ) -> Callable[[Job], None]:
        """Digest the state at loss calls: the first one of the child, or all with `watch`."""
        stop_after = op.get("stop_after")
        first: list[int] = []

        def on_loss(job: Job) -> None:
            if not first:
                result["arrived"] = {"step": job.step, "ties": job.ties()}
            if not first or op.get("watch"):
                states[str(job.step)] = job.leaves()
            if op.get("realign") and not first:
                job.realign()
            first.append(job.step)
            if stop_after is not None and len(first) > stop_after:
                raise Stopped

        return on_loss

    def _loop(self, op: dict[str, Any]) -> None:
        if op.get("resume") not in (False, None):
            self.load(None if op["resume"] is True else op["resume"])
        while op["until"] is None or self.job.step < op["until"]:
            self.job.train(1)
            if self.job.step in op.get("save_at", ()):
                self.save(self.job.step)

    def _fit(self, op: dict[str, Any]) -> None:
        until = op["until"] if op["until"] is not None else self.job.step + 1_000
        resume = op.get("resume") or False
        resume = Path(resume) if isinstance(resume, str) else resume
        self.opened.fit(self.job, until, tuple(op.get("save_at", ())), resume, self.journal)

    def save(self, step: int) -> None:
        """Save through the manager, with the journal's markers around it."""
        self.journal.begun(step)
        try:
            self.opened.save(self.job, step)
        except BaseException as error:
            self.journal.failed(step, error)
            raise
        self.journal.acknowledged(step)

    def load(self, step: int | str | None) -> int:
        """Load through the manager; the step that it gives becomes the job's."""
        if isinstance(step, str):
            found = self.opened.load_path(self.job, Path(step))
        else:
            found = self.opened.load(self.job, step)
        if not isinstance(found, int):
            msg = f"load returned {found!r}; the contract asks for the step as an int"
            raise TypeError(msg)
        self.job.step = found
        self.journal.note("loaded", step=found)
        return found

    def op_save(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Save now."""
        self.arm(op.get("faults", []))
        try:
            self.save(op.get("step", self.job.step))
        finally:
            result["faults"] = self.disarm()

    def op_load(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Load into the live job; the value is the step."""
        self.arm(op.get("faults", []))
        try:
            result["value"] = self.load(op.get("step"))
        finally:
            result["faults"] = self.disarm()

    def op_train(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Train n steps with the job's own loop."""
        result["records"] = [vars(record) for record in self.job.train(op["n"])]

    def op_steps(self, _op: dict[str, Any], result: dict[str, Any]) -> None:
        """Ask discovery."""
        found = list(self.opened.steps())
        if not all(isinstance(step, int) for step in found):
            msg = f"steps() gave {found!r}; the contract asks for ints"
            raise TypeError(msg)
        result["value"] = found

    def op_leaves(self, _op: dict[str, Any], result: dict[str, Any]) -> None:
        """Digest the live state."""
        result["value"] = self.job.leaves()

    def op_payload_samples(self, _op: dict[str, Any], result: dict[str, Any]) -> None:
        """Give bytes of tensors that must stand in an uncompressed payload, by saved step."""
        result["value"] = self.payload_samples

    def op_perturb(self, _op: dict[str, Any], _result: dict[str, Any]) -> None:
        """Change every live tensor and every generator."""
        self.job.perturb()

    def op_fresh(self, op: dict[str, Any], _result: dict[str, Any]) -> None:
        """Replace the job by a fresh one in the same process; the manager stays."""
        self.job = self.new_job({**self.program["job"], **op.get("job", {})})

    def op_materialize(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Close the manager and make its directory a copy of a tree; the next one opens anew."""
        self.op_close(op, result)
        trees.materialize(Path(op["tree"]), self.root)

    def op_close(self, _op: dict[str, Any], _result: dict[str, Any]) -> None:
        """Close the manager; the next operation opens a new one."""
        if self._opened is not None and hasattr(self._opened, "close"):
            self._opened.close()
        self._opened = None

    def op_copy_out(self, op: dict[str, Any], _result: dict[str, Any]) -> None:
        """Copy the manager's directory as it is now to a new place."""
        trees.copy(self.root, Path(op["tree"]))

    def op_gate(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Set the upload gate (open, shut, fail) after some files; or wait for files to arrive."""
        if op["state"] == "await":
            result["value"] = self.gate.wait_for_upload(op.get("count", 1))
        else:
            result["value"] = self.gate.set(op["state"], op.get("after", 0))

    def op_call(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Call a capability's method; `$job` in the arguments is the live job."""
        args = [self.job if arg == "$job" else arg for arg in op.get("args", [])]
        value = getattr(self.opened, op["method"])(*args)
        if op["method"].startswith("load") and isinstance(value, int):
            self.job.step = value
        result["value"] = value if isinstance(value, int | str | list | dict | None) else str(value)

    def op_probe(self, op: dict[str, Any], result: dict[str, Any]) -> None:
        """Run `module:function(child, **args)` and keep its plain value."""
        module, _, name = op["probe"].partition(":")
        result["value"] = getattr(importlib.import_module(module), name)(self, **op.get("args", {}))


def chain(error: BaseException | None) -> list[BaseException]:
    """Give an exception and what it was raised from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def ranks() -> Any:  # noqa: ANN401  the module
    """Give `ckpt_conformance.harness.ranks`; only children of a world import it."""
    return importlib.import_module("ckpt_conformance.harness.ranks")


def memory_kib(field: str) -> int:
    """Read a field of /proc/self/status in KiB: VmRSS, VmHWM, VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def run_program(program: dict[str, Any]) -> None:
    """Run a program to its end and write its result file."""
    if "rank_group" in program:
        rank_group.run(program, run_program)
        return
    torch.set_num_threads(1)
    baseline = memory_kib("VmRSS")
    if program.get("device") != devices.CUDA:  # CUDA takes addresses for all memory that there is
        limit = memory_kib("VmSize") * 1024 + program.get("memory", MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak: it is inherited over fork
    if "world" in program:
        ranks().join(program["world"])
    child = Child(program)
    results = child.run()
    report = {"results": results, "baseline_kib": baseline, "peak_kib": memory_kib("VmHWM")}
    target = Path(program["result"])
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(report, default=str))
    partial.replace(target)
    if "world" in program:
        ranks().leave(program["world"], well=not any("error" in one for one in results))


def main() -> None:
    """Run the program of a file: `python -m ckpt_conformance.harness.child PROGRAM`."""
    sources.register_again()
    run_program(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # background threads of the manager end here, as they do when a job ends


if __name__ == "__main__":
    main()
