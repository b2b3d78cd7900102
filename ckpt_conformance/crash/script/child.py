"""Being a command: what a forked child does to look like a Python that was just started.

torch is imported already; everything else is as at a real start: `__main__`, sys.argv, sys.path,
standard streams, signals, generators that nobody seeded, threads and exit handlers at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import runpy
import signal
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_conformance.processes import lifecycle

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckpt_conformance.crash.script.command import Start

GENERATORS = ("random", "numpy", "torch")  # that a script may forget to seed
NOT_FOUND = 127  # exit status of a command that can't be started, as a shell has it


def take_place(output: int, errors: int, cwd: str) -> None:
    """Become the leader of a session with streams of its own; dies with its parent."""
    os.setsid()
    lifecycle.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, to in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, to)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)


def execute(words: Sequence[str]) -> NoReturn:
    """Start a program in place of this process."""
    try:
        os.execvp(words[0], list(words))  # noqa: S606  the user's own command
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND)


def become(start: Start, seeded: Collection[str] = ()) -> NoReturn:
    """Run a script or a module as the main program of this process; never returns."""
    code = 1
    try:
        _fresh_generators(seeded)
        code = _code_of(_main, start)
        # What an interpreter does at its end; there is no public way to ask for it.
        code = _code_of(getattr(threading, "_shutdown")) or code  # noqa: B009
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _main(start: Start) -> None:
    sys.argv = [start.target, *start.arguments]
    if start.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(start.target, run_name="__main__", alter_sys=True)
        return
    # Not runpy.run_path: it would leave a relative __file__ or an absolute sys.argv[0], and take
    # __main__ away before the exit handlers run.
    path = str(Path(start.target).absolute())
    sys.path[0] = str(Path(path).resolve().parent)
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    code: Any = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102  the user's own script


def _code_of(work: Any, *args: Any) -> int:  # noqa: ANN401  any function
    """Run; give the exit status that an interpreter would end with."""
    try:
        work(*args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201  as an interpreter does
        return 1
    except BaseException as error:  # noqa: BLE001  a child never returns into its parent's code
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _fresh_generators(seeded: Collection[str]) -> None:
    """Draw new seeds, as every start does; those of `seeded` get a fixed one."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    random.seed(0 if "random" in seeded else None)
    if numpy is not None:
        numpy.random.seed(0 if "numpy" in seeded else None)
    if torch is not None:
        generator = torch.default_generator
        generator.manual_seed(0) if "torch" in seeded else generator.seed()
