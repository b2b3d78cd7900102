"""The truth about a file: what its library does when it loads it, in a child that can do no harm.

A server that reads requests from its standard input, each a line of JSON, and answers so. It forks
a child for each: what may run code there is seen by an audit hook, told, and ends the child before
it is done. Whether a load asks for a name is seen there, too (`pickle.find_class`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import torch as safetensors_torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

_SECONDS = 20  # of processor time, for a load
_MEMORY = 6 << 30  # torch itself maps some of it
_FILE = 64 << 20  # bytes that are written by a child
_RAN = 77
_BUSY = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"),
    *(
        "subprocess.Popen",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.symlink",
        "os.link",
    ),
    *("os.chmod", "os.chown", "os.truncate", "os.kill", "os.putenv", "os.unsetenv", "os.chdir"),
    *(
        "shutil.rmtree",
        "shutil.move",
        "shutil.copyfile",
        "shutil.unpack_archive",
        "webbrowser.open",
    ),
    *("socket.connect", "socket.bind", "urllib.Request", "ctypes.dlopen", "code.__new__"),
    *(
        "signal.pthread_kill",
        "tempfile.mkstemp",
        "tempfile.mkdtemp",
        "builtins.input",
        "syslog.syslog",
    ),
)


# -- loads -----------------------------------------------------------------------------------------


def _torch(path: Path) -> object:
    return torch.load(path, weights_only=False, map_location="cpu")


def _pickle(path: Path) -> object:
    with path.open("rb") as file:
        return pickle.load(file)  # noqa: S301  that is what is looked at


def _numpy(path: Path) -> object:
    held = np.load(path, allow_pickle=True)
    return {name: held[name] for name in held} if isinstance(held, np.lib.npyio.NpzFile) else held


def _dcp(path: Path) -> object:
    state: dict[str, Any] = {}
    planner = default_planner._EmptyStateDictLoadPlanner()
    reader = dcp.FileSystemReader(path)
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def _orbax(path: Path) -> object:
    """Read every array of a database or a folder of Zarr, as Orbax does by TensorStore."""
    import tensorstore

    found: dict[str, object] = {}
    for name, spec in _arrays(path, tensorstore):
        array = tensorstore.open(spec, read=True, open=True).result()
        found[name] = np.asarray(array.read().result())
    return found


def _arrays(path: Path, tensorstore: Any) -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: ANN401
    ends = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
    if (path / "manifest.ocdbt").exists():
        base = {"driver": "ocdbt", "base": f"file://{path}/"}
        store = tensorstore.KvStore.open(base).result()
        names = [key.decode() for key in store.list().result()]
    else:
        names = [one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()]
    for name in sorted(names):
        for end, driver in ends.items():
            if name.endswith(end):
                own = name.removesuffix(end)
                inside = {"driver": "file", "path": f"{path}/{own}/"}
                if (path / "manifest.ocdbt").exists():
                    inside = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{own}/"}
                yield own, {"driver": driver, "kvstore": inside}


def _gguf(path: Path) -> object:
    from gguf import GGUFReader

    return {one.name: np.array(one.data) for one in GGUFReader(path).tensors}


def _flax(path: Path) -> object:
    """Load as flax does; without arrays another writer may have put bytes where texts stand."""
    import msgpack

    limits = dict.fromkeys(("max_str_len", "max_bin_len", "max_ext_len"), 1 << 24)
    data, extensions = path.read_bytes(), list[int]()
    value = msgpack.unpackb(
        data,
        strict_map_key=False,
        raw=True,
        ext_hook=lambda code, _: extensions.append(code),
        **limits,
    )
    return msgpack.unpackb(data, strict_map_key=False, raw=False, **limits) if extensions else value


def _zip(path: Path) -> object:
    with zipfile.ZipFile(path) as archive:
        return {one.filename: archive.read(one) for one in archive.infolist()}


LOADS: dict[str, Callable[[Path], object]] = {
    "torch": _torch,
    "pickle": _pickle,
    "numpy": _numpy,
    "dcp": _dcp,
    "safetensors": safetensors_torch.load_file,
    "json": lambda path: json.loads(path.read_bytes().decode()),
    "orbax": _orbax,
    "gguf": _gguf,
    "flax-msgpack": _flax,
    "zip": _zip,
}
"""What loads a format, as its users do who trust it."""


def save(how: str, value: object, to: Path) -> bool:
    """Save anew what was loaded; False where there is no saying how."""
    if how == "torch":
        torch.save(dense(value), to / "again.pt")
    elif how == "safetensors":
        safetensors_torch.save_file(value, to / "again.safetensors")
    elif how == "dcp":
        dcp.save(value, checkpoint_id=to / "step_1", no_dist=True)
    else:
        return False
    return True


def dense(value: Any) -> Any:  # noqa: ANN401  what was loaded
    """Return values of which no tensor is a view: a reader that mistakes strides reads others."""
    if type(value) is dict:
        return {key: dense(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(dense, value))
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_conj():
        return value.detach().clone().contiguous().requires_grad_(value.requires_grad)
    return value


def same(a: object, b: object) -> bool:  # noqa: PLR0911  a case each
    """Return whether two loads gave the same, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            return False
        one, two = (held.detach().resolve_conj().resolve_neg().contiguous() for held in (a, b))
        return one.numel() == 0 or bool(
            torch.equal(one.flatten().view(torch.uint8), two.flatten().view(torch.uint8))
        )
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype.hasobject:
            return b.dtype == a.dtype and same(a.tolist(), b.tolist())
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(map(repr, a)) == list(map(repr, b))
        return keys and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:  # noqa: BLE001  an object that cannot be written: its text
        return repr(a) == repr(b)


# -- in a child ------------------------------------------------------------------------------------


class _Watch:
    """Sees what a load asks for; ends the process where it would run something."""

    def __init__(self, out: int) -> None:
        self.out, self.is_on = out, False
        self.names: set[str] = set()
        tempfile.gettempdir()  # the first time it tries to write where it may: no load does it then
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "pickle.find_class":
            self.names.add(f"{args[0]}\n{args[1]}")
        elif (
            event in _BUSY
            or (event == "open" and _is_write(args))
            or (event == "exec" and _is_text(args[0]))
        ):
            if _imports() or _is_of_torchs_tar():
                return  # what a module does when it is imported is no code of the file
            self.is_on = False
            what = f"{event} {str(args)[:200]}"
            os.write(self.out, json.dumps({"ran": what}).encode())
            os._exit(_RAN)


def _is_write(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(sign in mode for sign in "wax+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_text(code: object) -> bool:
    """Return whether code was compiled from a text, and not read from a module."""
    return getattr(code, "co_filename", "").startswith("<string")


def _is_of_torchs_tar() -> bool:
    """Return whether torch makes the folder in which it unpacks a tar of torch before 0.1.10."""
    return any(
        (code.co_filename, code.co_name) == (torch.serialization.__file__, "mkdtemp")
        for code in _callers()
    )


def _imports() -> bool:
    return any(code.co_filename.startswith("<frozen importlib") for code in _callers())


def _callers() -> Iterator[CodeType]:
    """Yield what was called, and has not returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _child(asked: dict[str, Any], out: int) -> None:
    """Load a file, and say what came of it."""
    for limit, value in (
        (resource.RLIMIT_CPU, _SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    watch, told = _Watch(out), dict[str, Any]()
    try:
        watch.is_on = True
        value = LOADS[asked["how"]](Path(asked["path"]))
        watch.is_on = False
        told["loaded"] = True
        if asked.get("like"):
            told["same"] = same(value, LOADS[asked["how"]](Path(asked["like"])))
        if asked.get("again"):
            with contextlib.suppress(Exception):
                told["saved"] = save(asked["how"], value, Path(asked["again"]))
    except BaseException as error:  # noqa: BLE001  whatever a library raises
        watch.is_on = False
        text = str(error).strip()
        if isinstance(error, dcp.api.CheckpointException):  # its last line is what was raised
            text = text.splitlines()[-1]
        told["error"] = f"{type(error).__name__}: {text[:300]}"
    told["names"] = sorted(watch.names)
    os.write(out, json.dumps(told).encode()[: 1 << 16])


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask a child; what it has said, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _child(asked, writing)
        finally:
            os._exit(0)
    os.close(writing)
    said = b""
    while select.select([reading], [], [], 3 * _SECONDS)[0]:
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        said += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    try:
        told: dict[str, Any] = json.loads(said)
    except ValueError:
        return {"error": f"the load ended with {status}", "names": [], "died": True}
    return told


def main() -> None:
    """Answer until there are no more requests."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        import tensorstore  # noqa: F401  the children have it then
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
