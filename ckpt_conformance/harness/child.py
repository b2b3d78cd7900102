"""One child process: what it does from birth to its end or its death.

It runs a program (see `messages.py`), leaves a report with a result for each operation, and ends. A
program with a `rank_group` forks one process for each rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import structs

from ckpt_conformance.contract import OpenOptions, registry, trees
from ckpt_conformance.contract.journal import ChildJournal
from ckpt_conformance.harness import messages, preload, rank_group, reach, watching
from ckpt_conformance.harness.gate import Gate as UploadGate
from ckpt_conformance.harness.messages import Program, Report
from ckpt_conformance.harness.pending_saves import pending_save, wait_for, wait_until_done
from ckpt_conformance.processes import lifecycle, unix_sockets
from ckpt_conformance.trace import sources
from ckpt_conformance.workload import devices
from ckpt_conformance.workload.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ckpt_conformance.contract import PendingSave
    from ckpt_conformance.harness.messages import AnyOp, AnyResult, Error, FaultReport

    Draft = dict[str, object]  # the fields of a result, as far as they are known

SHARDED = "sharded"  # the kind of job that ranks share
RESULTS: dict[str, Callable[..., AnyResult]] = {  # by the name of the operation
    str(kind.__struct_config__.tag): cast("Any", kind) for kind in messages.Result.__subclasses__()
}


class Stopped(BaseException):
    """Ends a framework's loop from inside a loss call; no framework catches it as its own."""


class Child:
    """The state of a running child, and its operations: each method `op_<name>` is one."""

    def __init__(self, program: Program) -> None:
        """Seed the job, open the journal; the manager opens when an operation needs it."""
        self.program = program
        self.root = Path(program.root)
        self.options = program.options  # of the managers that are opened from now on
        self.adapter = registry.get(program.adapter)
        self.journal = ChildJournal(Path(program.journal), program.rank)
        self.gate = UploadGate()
        self.faults: list[Any] = []
        self.payload_samples: dict[int, Any] = {}
        self.job = self._first_job(program.job)
        self._opened: Any = None
        self._prepared: Any = None  # the job that the open manager has prepared
        self._pending: tuple[int, Any] | None = None  # step and PendingSave
        self._begun: list[tuple[int, PendingSave | None]] = []  # by `BeginSave`; None has ended
        self._saves_in_background = False
        self.journal.on_acknowledged = self._acknowledged
        self._watch_early()

    def _watch_early(self) -> None:
        """Let injectors watch before anything runs that have to, to hit what began before them."""
        names = {fault.injector for op in self.program.ops for fault in messages.faults_of(op)}
        for injector in sorted(names):
            getattr(_attribute(injector), "watch", lambda: None)()

    def _first_job(self, spec: messages.JobSpec) -> Any:  # noqa: ANN401
        """Build the job; where that fails no manager has been called, and the process says so."""
        try:
            return self.new_job(spec)
        except Exception:  # noqa: BLE001  whatever it is, it is ours
            traceback.print_exc()
            lifecycle.exit_now(lifecycle.NO_JOB)

    def new_job(self, spec: messages.JobSpec) -> Any:  # noqa: ANN401  Job | ShardedJob
        """Build a job whose records go to the journal."""
        if spec.kind == SHARDED:
            job: Any = ranks().job(spec)
        else:
            job = Job(spec.kind, spec.seed, variant=spec.variant, without=spec.without)
        if spec.data_seed is not None:
            job.loader.seed = spec.data_seed
        job.on_record = self.journal.record
        return job

    @property
    def opened(self) -> Any:  # noqa: ANN401  Manager | Trainer
        """The live manager or trainer; opened once.

        Raises OptionNotImplementedError where the adapter does not implement an option.
        """
        if self._opened is None:
            wanted = self.options
            place = wanted.mirror
            mirror = place if place is None or "://" in place else Path(place)
            gate = self.gate.pass_through if wanted.gated else None
            options = OpenOptions(wanted.keep_last, mirror, gate, wanted.kind)
            try:
                self._opened = self.adapter.open(self.root, options)
            except NotImplementedError as error:
                if wanted == messages.Options():
                    raise  # nothing was asked for
                raise messages.OptionNotImplementedError(f"{wanted.to_text()}: {error}") from error
        return self._opened

    def prepare(self) -> None:
        """Let the manager wrap the job, once, where the adapter says that it does."""
        if self.adapter_prepares and self._prepared is not self.job:
            self.opened.prepare(self.job)
            self._prepared = self.job

    @property
    def adapter_prepares(self) -> bool:
        """Whether managers of the adapter wrap a job before it trains."""
        return bool(getattr(self.adapter, "prepares", False))

    def run(self) -> tuple[AnyResult, ...]:
        """Run every operation until one raises that does not say `go_on`."""
        results: list[AnyResult] = []
        for op in self.program.ops:
            results.append(self.run_one(op))
            if results[-1].error and not op.go_on:
                break
        return tuple(results)

    def run_one(self, op: AnyOp) -> AnyResult:
        """Run one operation and return its result, with the error if it raised."""
        name = str(op.__struct_config__.tag)
        draft: Draft = {}
        try:
            getattr(self, f"op_{name}")(op, draft)
        except BaseException as error:  # DCP's is no Exception; all is to be seen
            is_end = isinstance(error, SystemExit | KeyboardInterrupt)
            if is_end and not getattr(error, "is_injected", False):
                raise
            draft["error"] = self.describe(error)
            self.disarm()
        return RESULTS[name](**draft)

    def describe(self, error: BaseException) -> Error:
        """Describe an exception in plain values."""
        refusals: tuple[type[BaseException], ...] = getattr(self.adapter, "refusals", ())
        typed = isinstance(error, tuple(refusals))
        memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        lines = str(error).strip().splitlines() or [""]
        message = lines[0][:250] + (f" ... {lines[-1][-240:]}" if len(lines) > 1 else "")
        number = getattr(error, "errno", None)
        return messages.Error(
            type=messages.name_of(type(error)),
            message=message,
            typed=typed,
            memory=memory,
            disk=any(isinstance(cause, OSError) for cause in chain(error)),
            where=tuple(where),
            errno=number if isinstance(number, int) else None,
        )

    # -- faults ---------------------------------------------------------------------------------

    def arm(self, faults: Sequence[messages.Fault]) -> None:
        """Install fault injectors."""
        for fault in faults:
            injector = _attribute(fault.injector)(
                root=self.root, journal=self.journal, **fault.args
            )
            injector.install()
            self.faults.append(injector)

    def disarm(self) -> tuple[FaultReport, ...]:
        """Remove every injector, last first, and say how often each was called and fired."""
        reports: list[FaultReport] = []
        while self.faults:
            injector = self.faults.pop()
            injector.remove()
            report = messages.FaultReport(
                name=getattr(injector, "name", ""),
                calls=injector.calls,
                fired=injector.fired,
                log=tuple(injector.log),
                unsupported=tuple(getattr(injector, "unsupported", ())),
            )
            reports.append(report)
        return tuple(reports)

    def _acknowledged(self, step: int) -> None:
        if not self.program.snapshots:
            return
        world = self.program.world
        several = world is not None and world.size > 1
        if several:
            ranks().together()  # acknowledged is what every rank has acknowledged
        if step not in self.payload_samples:  # else they were taken when the save began
            self.payload_samples[step] = self.job.payload_samples()
        if world is None or world.rank == 0:
            trees.copy_live(self.root, Path(self.program.snapshots) / str(step))
        if several:
            ranks().together()

    # -- operations -------------------------------------------------------------------------------

    def op_run(self, op: messages.Run, result: Draft) -> None:
        """Train to a step with saves, by the harness's loop or by the framework's."""
        states: dict[int, Any] = {}
        result["states"] = states
        self.job.on_loss = self._watcher(op, states, result)
        if op.fault_step is None:
            self.arm(op.faults)
        else:
            self.journal.on_begun = partial(self._arm_at, op)
        first = len(self.journal.records)
        try:
            with contextlib.suppress(Stopped):
                (self._fit if self.adapter.shape == "trainer" else self._loop)(op)
            self.finish_save()
            self.settle(op.faults)
        finally:
            result["faults"] = self.disarm()
            self.journal.on_begun = lambda _: None
            result["records"] = tuple(self.journal.records[first:])
            result["step"] = int(self.job.step)
            result["in_background"] = self._saves_in_background
        if op.final:
            result["final"] = self.job.leaves()
        if op.overlaps:
            result["overlaps"] = self.job.overlaps()

    def _arm_at(self, op: messages.Run | messages.Preempt, step: int) -> None:
        """Arm the faults of a run as the save of its `fault_step` begins.

        A trainer may save in a thread: what that still writes of an earlier step is not to be hit.
        """
        if step == op.fault_step:
            self.journal.wait_for_saves_before(step)
            self.arm(op.faults)

    def _watcher(
        self, op: messages.Run, states: dict[int, Any], result: Draft
    ) -> Callable[[Job], None]:
        """Digest the state at loss calls: the first one of the child, or all with `watch`."""
        first: list[int] = []

        def on_loss(job: Job) -> None:
            if not first:
                result["arrived"] = messages.Arrived(step=job.step, ties=job.ties())
            if not first or op.watch:
                states[job.step] = job.leaves()
            if op.realign and not first:
                job.realign()
            first.append(job.step)
            if op.stop_after is not None and len(first) > op.stop_after:
                raise Stopped

        return on_loss

    def _loop(self, op: messages.Run) -> None:
        self.prepare()
        if op.resume is not False:
            self.load(None if op.resume is True else op.resume)
        while op.until is None or self.job.step < op.until:
            self.job.train(1)
            if self.job.step in op.save_at:
                self.save(self.job.step)

    def _fit(self, op: messages.Run) -> None:
        until = op.until if op.until is not None else self.job.step + 1_000
        resume = Path(op.resume) if isinstance(op.resume, str) else op.resume
        self.opened.fit(self.job, until, op.save_at, resume, self.journal)

    def save(self, step: int) -> None:
        """Begin to save through the manager, with the journal's markers around it.

        Waits for an earlier save that goes on in the background first.
        """
        self.finish_save()
        self.prepare()
        self.journal.begun(step)
        with self._noting_failure(step):
            pending = pending_save(self.opened.save(self.job, step))
        if self.program.snapshots:
            self.payload_samples[step] = self.job.payload_samples()
        if pending is None:
            self.journal.acknowledged(step)
        else:
            self._pending, self._saves_in_background = (step, pending), True

    def finish_save(self) -> None:
        """Wait for a save that goes on in the background; raises what made it fail."""
        if self._pending is None:
            return
        (step, pending), self._pending = self._pending, None
        with self._noting_failure(step):
            wait_for(pending)
        self.journal.acknowledged(step)

    def settle(self, faults: Sequence[messages.Fault]) -> None:
        """Let faults meet what the manager does after a save has returned, where it says so."""
        if faults and self._opened is not None and hasattr(self._opened, "settle"):
            self._opened.settle()

    @contextlib.contextmanager
    def _noting_failure(self, step: int) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self.journal.failed(step, error)
            raise

    def load(self, step: int | str | None) -> int:
        """Load through the manager; the step that it returns becomes the job's.

        Raises TypeError if what it returns is no step.
        """
        self.prepare()
        if isinstance(step, str):
            loaded = self.opened.load_path(self.job, Path(step))
        else:
            loaded = self.opened.load(self.job, step)
        if not isinstance(loaded, int):
            msg = f"load returned {loaded!r}; the contract asks for the step as an int"
            raise TypeError(msg)
        self.job.step = int(loaded)
        self.journal.note("loaded", step=loaded)
        return int(loaded)

    def op_save(self, op: messages.Save, result: Draft) -> None:
        """Save now."""
        self.arm(op.faults)
        try:
            self.save(self.job.step if op.step is None else op.step)
            self.finish_save()
            self.settle(op.faults)
        finally:
            result["faults"] = self.disarm()

    def op_begin_save(self, op: messages.BeginSave, result: Draft) -> None:
        """Begin to save, and do not wait; the faults stay armed."""
        step = self.job.step if op.step is None else op.step
        self.prepare()
        self.arm(op.faults)
        self.journal.begun(step)
        with self._noting_failure(step):
            begin = getattr(self.opened, "save_async", self.opened.save)
            pending = pending_save(begin(self.job, step))
        if pending is not None:
            held = [fault.await_first() for fault in self.faults if hasattr(fault, "await_first")]
            result["is_held"] = any(held)
            result["goes_on"] = not pending.done()
        earlier = [one for _, one in self._begun if one is not None]
        result["beside"] = sum(not one.done() for one in earlier)
        self._begun.append((step, pending))

    def op_end_saves(self, op: messages.EndSaves, result: Draft) -> None:
        """Let what is held go on, and wait for the saves that were begun."""
        if op.hurries:
            with self._in_a_hurry():
                result["saves"] = tuple(self._waited(*one) for one in self._begun)
            return
        begun, self._begun = self._begun, []
        self.let_go()
        try:
            if op.asks:
                result["saves"] = tuple(self._ended(*one, polls=op.polls) for one in begun)
            else:
                wait_until_done(pending for _, pending in begun)
        finally:
            result["faults"] = self.disarm()

    @contextlib.contextmanager
    def _in_a_hurry(self) -> Generator[None]:
        """Let the patience of the caller end at once, where a fault holds what it waits for."""
        with contextlib.ExitStack() as stack:
            for injector in self.faults:
                if hasattr(injector, "hurry"):
                    stack.enter_context(injector.hurry())
            yield

    def let_go(self) -> None:
        """Let each injector that holds something let it go on."""
        for injector in self.faults:
            getattr(injector, "let_go", lambda: None)()

    def _ended(self, step: int, pending: PendingSave | None, *, polls: bool) -> messages.EndedSave:
        """Wait for one save, as jobs do, and ask its handle once more; first as one that polls."""
        if pending is None:
            self.journal.acknowledged(step)
            return messages.EndedSave(step=step, done=True)
        done = bool(pending.done())
        polled = self._polled(pending) if polls else None
        errors = [self._asked(wait_for, pending), self._asked(_wait, pending)]
        if errors[0] is None:
            self.journal.acknowledged(step)
        else:
            self.journal.failed(step, RuntimeError(errors[0].message))
        return messages.EndedSave(
            step=step,
            done=done,
            is_over=bool(pending.done()),
            error=errors[0],
            again=errors[1],
            was_asked_again=True,
            was_polled=polls,
            polled=polled,
        )

    def _waited(self, step: int, pending: PendingSave | None) -> messages.EndedSave:
        """Wait for one save and ask nothing more; it is asked again later."""
        if pending is None:
            return messages.EndedSave(step=step, done=True)
        done = bool(pending.done())
        error = self._asked(_wait, pending)
        is_over = bool(pending.done())
        return messages.EndedSave(step=step, done=done, is_over=is_over, error=error)

    def _polled(self, pending: PendingSave) -> Error | None:
        """Ask what made a save fail, once it says that it is done; nobody has waited."""
        wait_until_done([pending])
        error = pending.exception()
        return None if error is None else self.describe(error)

    def _asked(self, ask: Callable[[PendingSave], None], pending: PendingSave) -> Error | None:
        try:
            ask(pending)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  DCP's is no Exception
            return self.describe(error)
        return None

    def op_emergency_save(self, op: messages.EmergencySave, result: Draft) -> None:
        """Dump now."""
        self.prepare()
        self.arm(op.faults)
        try:
            self.dump(self.job.step if op.step is None else op.step)
        finally:
            result["faults"] = self.disarm()

    def dump(self, step: int) -> None:
        """Dump through the manager, with the journal's markers around it."""
        self.journal.begun(step)
        with self._noting_failure(step):
            self.opened.save_emergency(self.job, step)
        self.journal.acknowledged(step)

    def op_preempt(self, op: messages.Preempt, result: Draft) -> None:
        """Train with saves until SIGTERM has come, and dump between two steps."""
        self.prepare()
        has_come = self.opened.catch_sigterm()
        self.journal.on_begun = partial(self._arm_at, op)
        try:
            while self.job.step < op.until and result.get("dumped") is None:
                self.job.train(1)
                if has_come():
                    self.dump(self.job.step)
                    result["dumped"] = int(self.job.step)
                elif self.job.step in op.save_at:
                    self.save(self.job.step)
            self.finish_save()
        finally:
            result["faults"] = self.disarm()
            self.journal.on_begun = lambda _: None

    def op_load(self, op: messages.Load, result: Draft) -> None:
        """Load into the live job."""
        self.arm(op.faults)
        try:
            result["step"] = self.load(op.step)
        finally:
            result["faults"] = self.disarm()

    def op_train(self, op: messages.Train, result: Draft) -> None:
        """Train n steps with the job's own loop."""
        self.prepare()
        result["records"] = tuple(self.job.train(op.n))

    def op_steps(self, _op: messages.Steps, result: Draft) -> None:
        """List the steps that the manager names."""
        steps = list(self.opened.steps())
        if not all(isinstance(step, int) for step in steps):
            msg = f"steps() gave {steps!r}; the contract asks for ints"
            raise TypeError(msg)
        result["steps"] = [int(step) for step in steps]

    def op_leaves(self, _op: messages.ReadLeaves, result: Draft) -> None:
        """Digest the live state."""
        result["leaves"] = self.job.leaves()

    def op_payload_samples(self, _op: messages.ReadPayloadSamples, result: Draft) -> None:
        """Report the samples that were taken after each acknowledged save."""
        result["samples"] = self.payload_samples

    def op_perturb(self, _op: messages.Perturb, _result: Draft) -> None:
        """Change every live tensor and every generator."""
        self.job.perturb()

    def op_fresh(self, op: messages.Fresh, _result: Draft) -> None:
        """Replace the job by a fresh one in the same process; the manager stays."""
        self.fresh(op.seed, op.kind)

    def fresh(self, seed: int | None = None, kind: str | None = None) -> None:
        """Replace the job, as its program has it but for what is given."""
        fields = {"seed": seed, "kind": kind}
        changes = {name: value for name, value in fields.items() if value is not None}
        self.job = self.new_job(structs.replace(self.program.job, **changes))

    def op_materialize(self, op: messages.Materialize, _result: Draft) -> None:
        """Close the manager and make its directory a copy of a tree; the next one opens anew."""
        self.close()
        trees.materialize(Path(op.tree), self.root)

    def op_close(self, op: messages.Close, _result: Draft) -> None:
        """Close the manager."""
        with self._in_a_hurry() if op.hurries else contextlib.nullcontext():
            self.close()

    def close(self) -> None:
        """Wait for what it does in the background, and close it; the next operation opens anew."""
        try:
            for method in ("settle", "close"):
                if self._opened is not None and hasattr(self._opened, method):
                    getattr(self._opened, method)()
        finally:  # one that says what has failed is closed, too
            self._opened = self._prepared = None

    def op_copy_out(self, op: messages.CopyOut, _result: Draft) -> None:
        """Copy the manager's directory as it is now; raises OSError where it never rests."""
        if not trees.copy_live(self.root, Path(op.tree)):
            raise OSError(f"{self.root} changed in each of {trees.TRIES} copies of it")

    def op_gate(self, op: messages.Gate, result: Draft) -> None:
        """Set the upload gate after some files, or wait for files to arrive."""
        if op.state == "await":
            result["done"] = self.gate.wait_for_upload(op.count, op.only)
        else:
            result["failed"], result["done"] = self.gate.failed, True
            result["came"] = self.gate.set(op.state, op.after, op.only)

    def op_call(self, op: messages.Call, result: Draft) -> None:
        """Call a capability's method."""
        if "$job" in op.args:
            self.prepare()
        args = [self.job if arg == "$job" else arg for arg in op.args]
        method = getattr(self.opened, op.method)
        self.arm(op.faults)
        try:
            value = method(*args)
            if pending := pending_save(value):
                wait_for(pending)
                value = None
        finally:
            result["faults"] = self.disarm()
        if op.method.startswith("load") and isinstance(value, int):
            self.job.step = value
        result["value"] = value if isinstance(value, int | str | list | dict | None) else str(value)

    def op_probe(self, op: messages.Probe, result: Draft) -> None:
        """Run `module:function(child, **args)` and keep its plain value."""
        result["value"] = _attribute(op.probe)(self, **op.args)


def _attribute(place: str) -> Any:  # noqa: ANN401  an injector or a probe
    """Import what is named as `module:attribute`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _wait(pending: PendingSave) -> None:
    """Wait for a save, as a job that asks for nothing else."""
    pending.wait()


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception and, nearest first, the exceptions that it was raised from."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return errors


def ranks() -> Any:  # noqa: ANN401  the module
    """Import `ckpt_conformance.harness.ranks`, which only children of a world need."""
    return importlib.import_module("ckpt_conformance.harness.ranks")


def memory_kib(field: str) -> int:
    """Read a field of /proc/self/status in KiB: VmRSS, VmHWM, VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def run_program(program: Program) -> None:
    """Run a program to its end and write its report."""
    if program.rank_group:
        rank_group.run(program, run_program)
        return
    unix_sockets.shorten_those_of_multiprocessing()
    torch.set_num_threads(1)
    preload.ensure(program.adapter)  # before its memory is counted: nobody forks from here
    baseline = memory_kib("VmRSS")
    if program.device != devices.CUDA:  # CUDA takes addresses for all memory that there is
        limit = memory_kib("VmSize") * 1024 + program.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak: it is inherited over fork
    if program.world:
        ranks().join(program.world)
    results = Child(program).run()
    report = Report(results=results, baseline_kib=baseline, peak_kib=memory_kib("VmHWM"))
    target = Path(program.result)
    unfinished = target.with_suffix(".part")
    unfinished.write_bytes(messages.encode(report))
    unfinished.replace(target)
    if program.world:
        ranks().leave(program.world, well=not any(result.error for result in results))


def main() -> None:
    """Run the program of a file: `python -m ckpt_conformance.harness.child PROGRAM`."""
    reach.inherit()
    sources.register_again()
    watching.take_over()
    run_program(messages.decode(Path(sys.argv[1]).read_bytes(), Program))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # background threads of the manager end here, as they do when a job ends


if __name__ == "__main__":
    main()
