"""What a run opens is noted: against what it does, and against a tracer of system calls."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.harness import opened

if TYPE_CHECKING:
    from pathlib import Path

PREPARE = """
import sys
from pathlib import Path
from ckpt_conformance.harness import opened, watching
server = Path(sys.argv[1])
opened.prepare(server)
watching.install(server)
watching.begin("theirs", str(server / "root"))
import ctypes, importlib, io, json, os, signal, socket, subprocess, threading
there = Path(sys.argv[2])
"""
SEEN = {
    "changed where it is": ("os.utime(there / 'a.json')", "exists", "a.json"),
    "given another mode": ("os.chmod(there / 'a.json', 0o644)", "exists", "a.json"),
    "asked for attributes": ("os.listxattr(there / 'a.json')", "exists", "a.json"),
    "gone into": ("os.chdir(there)", "exists", ""),
    "asked for the room of its disk": ("os.statvfs(there)", "exists", ""),
    "asked for its limits": ("os.pathconf(there, 'PC_NAME_MAX')", "exists", ""),
    "read": ("json.loads((there / 'a.json').read_text())", "file", "a.json"),
    "read by descriptor": ("os.close(os.open(there / 'a.json', os.O_RDONLY))", "file", "a.json"),
    "looked for": ("(there / 'no.json').exists() or open(there / 'no.json')", "file", "no.json"),
    "read and written": ("open(there / 'a.json', 'r+').close()", "file", "a.json"),
    "imported": ("sys.path.append(str(there)); import in_there", "file", "in_there.py"),
    "looked into": ("sys.path.append(str(there)); import in_there", "modules", ""),
    "listed": ("list(there.iterdir())", "folder", ""),
    "searched": ("list(there.glob('*.json'))", "folder", ""),
    "a library": ("ctypes.CDLL(str(there / 'liby.so.1'))", "file", "liby.so.1"),
    "opened to add to it": ("open(there / 'a.json', 'a+').close()", "file", "a.json"),
    "opened if it is there": (
        "os.read(os.open(there / 'a.json', os.O_RDWR | os.O_CREAT), 9)",
        "file",
        "a.json",
    ),
    "read after nothing was added": (
        "open(there / 'a.json', 'a').close(); open(there / 'a.json').close()",
        "file",
        "a.json",
    ),
    "read by a link below the root": (
        "x = server / 'root' / 'x'; x.parent.mkdir(); x.symlink_to(there / 'a.json'); open(x)",
        "file",
        "a.json",
    ),
    "read by another name below the root": (
        "x = server / 'root' / 'x'; x.parent.mkdir(); x.hardlink_to(there / 'a.json'); open(x)",
        "file",
        "a.json",
    ),
    "a database": ("import sqlite3; sqlite3.connect(there / 'a.db')", "file", "a.db"),
    "a database by its address": (
        "import sqlite3; sqlite3.connect(f'file:{there}/a%2Edb?mode=ro', uri=True)",
        "file",
        "a.db",
    ),
    "what a database has not merged yet": (
        "import sqlite3; sqlite3.connect(there / 'a.db')",
        "file",
        "a.db-wal",
    ),
    "a database that is made": (
        "import sqlite3; sqlite3.connect(there / 'new')",
        "exists",
        "new",
    ),
    "listed by descriptor": ("os.listdir(os.open(there, os.O_RDONLY))", "folder", ""),
    "walked by descriptor": ("list(os.fwalk(there))", "folder", ""),
    "a library by its name": (
        "os.environ['LD_LIBRARY_PATH'] = f'/nowhere:{there}'; ctypes.CDLL('liby.so.1')",
        "file",
        "liby.so.1",
    ),
    "named as ours are": (
        "(there / 'a.json').rename(server.parent / 'ckc-x'); open(server.parent / 'ckc-x')",
        "file",
        "../ckc-x",
    ),
    "moved over what was made": (
        "m = there / 'm'; m.write_text('1'); (there / 'a.json').replace(m); open(m)",
        "file",
        "a.json",
    ),
    "in a folder that is moved below one that was made": (
        "m = there / 'm'; m.mkdir(); (there / 'full').rename(m / 'd'); open(m / 'd' / 'z')",
        "file",
        "full/z",
    ),
    "in a folder that is moved below the root": (
        "m = server / 'root'; m.mkdir(); (there / 'full').rename(m / 'd'); open(m / 'd' / 'z')",
        "file",
        "full/z",
    ),
    "a link in place of what was made": (
        "m = there / 'm'; m.write_text('1'); m.unlink(); m.symlink_to(there / 'a.json'); open(m)",
        "file",
        "m",
    ),
    "another name in place of what was made": (
        "m = there / 'm'; m.write_text('1'); m.unlink(); m.hardlink_to(there / 'a.json'); open(m)",
        "file",
        "a.json",
    ),
    "made if it is not there": ("open(there / 'new', 'x')", "exists", "new"),
    "made or read": ("open(there / 'new', 'a+')", "file", "new"),
    "added to": ("open(there / 'new', 'a')", "written", "new"),
    "emptied if it is there": (
        "os.open(there / 'a.json', os.O_RDWR | os.O_TRUNC)",
        "exists",
        "a.json",
    ),
    "cut": ("os.truncate(there / 'a.json', 1)", "written", "a.json"),
    "removed": ("os.remove(there / 'a.json')", "exists", "a.json"),
    "removed by a folder": (
        "os.remove('a.json', dir_fd=os.open(there, os.O_RDONLY))",
        "exists",
        "a.json",
    ),
    "a folder that has to be empty": ("(there / 'empty').rmdir()", "folder", "empty"),
    "a folder that is made": ("(there / 'new').mkdir()", "exists", "new"),
    "a folder that is made if it is not there": ("there.mkdir(exist_ok=True)", "exists", ""),
    "asked for": ("(there / 'no.json').exists()", "exists", "no.json"),
    "asked about": ("(there / 'a.json').stat()", "exists", "a.json"),
    "asked about as a link": ("(there / 'a.json').is_symlink()", "exists", "a.json"),
    "asked about by a folder": (
        "os.stat('a.json', dir_fd=os.open(there, os.O_RDONLY))",
        "exists",
        "a.json",
    ),
    "asked whether it can be read": ("os.access(there / 'a.json', os.R_OK)", "exists", "a.json"),
    "a link that is followed by its text": (
        "(there / 'l').symlink_to('a.json'); os.readlink(there / 'l')",
        "link",
        "l",
    ),
    "a folder that is opened": ("os.open(there, os.O_RDONLY)", "exists", ""),
    "a package that is not there": (
        (
            "sys.path.append(str(there)); importlib.util.find_spec('os')\n"
            "try: import nowhere.at_all\nexcept ImportError: pass"
        ),
        "exists",
        "nowhere",
    ),
    "a package that is asked for": (
        "sys.path.append(str(there)); importlib.util.find_spec('nowhere')",
        "exists",
        "nowhere",
    ),
    "a package that is named by a string": (
        (
            "sys.path.append(str(there))\ntry: importlib.import_module('nowhere.at_all')\n"
            "except ImportError: pass"
        ),
        "exists",
        "nowhere",
    ),
    "a part of a package that is imported for it": (
        (
            "(there / 'pack').mkdir(); (there / 'pack' / '__init__.py').touch()\n"
            "sys.path.append(str(there))\ntry: import pack.part\nexcept ImportError: pass"
        ),
        "exists",
        "pack/part",
    ),
    "a part of a package that is not there": (
        (
            "(there / 'pack').mkdir(); sys.path.append(str(there)); import pack\n"
            "(there / 'pack').rmdir()\n"
            "try: import pack.part\nexcept ImportError: pass"
        ),
        "exists",
        "pack/part",
    ),
    "in a thread": (
        "t = threading.Thread(target=open, args=(there / 'a.json',)); t.start(); t.join()",
        "file",
        "a.json",
    ),
    "in a fork": ("os.fork() or open(there / 'a.json'); os.wait()", "file", "a.json"),
    "before a kill": (
        "open(there / 'a.json'); os.kill(os.getpid(), signal.SIGKILL)",
        "file",
        "a.json",
    ),
}


ITS_OWN = {
    "a file": "(there / 'x').write_text('1'); open(there / 'x')",
    "a file that it moved": "(there / 'y').write_text('1'); (there / 'y').rename(there / 'x')\n"
    "open(there / 'x')",
    "a file that it moved out of its root": "y = server / 'root' / 'y'; y.parent.mkdir()\n"
    "y.write_text('1'); y.rename(there / 'x'); open(there / 'x')",
    "another name of its file": "(there / 'y').write_text('1'); os.link(there / 'y', there / 'x')\n"
    "open(there / 'x')",
    "a database": "import sqlite3; sqlite3.connect(there / 'x').execute('create table t (a)')\n"
    "sqlite3.connect(there / 'x'); open(there / 'x')",
    "a file in a folder of its own": "f = there / 'f'; f.mkdir(); (f / 'x').write_text('1')\n"
    "os.listdir(f); open(f / 'x'); open(f / 'x', 'a+'); (f / 'x').unlink()",
    "a folder that it moved": "f = there / 'f'; f.mkdir(); (f / 'x').write_text('1')\n"
    "f.rename(there / 'x'); os.listdir(there / 'x'); open(there / 'x' / 'x')",
    "what it emptied": "open(there / 'a.json', 'w'); open(there / 'a.json')",
    "a temporary file": "import tempfile; tempfile.TemporaryFile(dir=there).write(b'1')",
}


def run(tmp_path: Path, text: str, *before: str) -> opened.Opened:
    """Run a text under the hook; return what was noted."""
    there, server = tmp_path / "there", tmp_path / "server"
    for folder in (there, server):
        folder.mkdir()
    (there / "a.json").write_text("{}")
    (there / "empty").mkdir()
    (there / "full").mkdir()
    (there / "full" / "z").write_text("{}")
    (there / "a.db").touch()  # a database without tables
    (there / "in_there.py").write_text("X = 1\n")
    (there / "liby.so.1").write_text("no library")
    words = [*before, sys.executable, "-B", "-c", PREPARE + text, str(server), str(there)]
    subprocess.run(words, check=False, capture_output=True, cwd=tmp_path, timeout=120)
    return opened.read(server, "theirs")


def names(found: opened.Opened, kind: str) -> set[str]:
    return {note.name for note in found.notes if note.kind == kind}


@pytest.mark.parametrize("what", SEEN)
def test_what_is_opened_is_noted(what: str, tmp_path: Path) -> None:
    text, kind, name = SEEN[what]
    found = run(tmp_path, text)
    assert found.is_whole
    assert os.path.normpath(tmp_path / "there" / name) in names(found, kind)


@pytest.mark.parametrize("what", ITS_OWN)
def test_what_a_run_made_itself_is_not_read_from_anybody(what: str, tmp_path: Path) -> None:
    found = run(tmp_path, ITS_OWN[what])
    assert found.is_whole
    read = {*names(found, "file"), *names(found, "folder"), *names(found, "written")}
    assert not [name for name in read if "/there/" in name]


def test_what_is_above_a_link_is_above_its_target(tmp_path: Path) -> None:
    """`link/../a.json` is beside what the link leads to, and not beside the link."""
    text = "(there / 'f').mkdir(); l = there.parent / 'l'; l.symlink_to(there / 'f')\n"
    found = run(tmp_path, text + "open(f'{l}/../a.json')")
    assert f"{tmp_path}/l/../a.json" in names(found, "file")


def test_variables_programs_and_addresses_are_noted(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        "os.environ.get('ONE'); os.getenv('TWO'); 'THREE' in os.environ; os.environb.get(b'FOUR')\n"
        "subprocess.run(['true']); os.system('false 1')\n"
        "s = socket.socket(); s.connect_ex(('127.0.0.1', 1))\n",
    )
    assert {"ONE", "TWO", "THREE", "FOUR"} <= names(found, "variable")
    assert {"true", "false"} <= names(found, "program")
    assert names(found, "address") == {"127.0.0.1:1"}


@pytest.mark.parametrize(
    "text",
    [
        "[name for name in os.environ if name.startswith('MY_')]",
        "dict(os.environ)",
        "os.environ.copy()",
        "len(os.environ)",
        "list(os.environb)",
    ],
)
def test_who_asks_for_all_variables_depends_on_their_names(text: str, tmp_path: Path) -> None:
    assert names(run(tmp_path, text), "variables") == {""}


def test_one_variable_is_not_all(tmp_path: Path) -> None:
    found = run(tmp_path, "os.environ.get('ONE'); subprocess.run(['true'])")
    assert names(found, "variables") == set()


def test_who_writes_the_environment_out_depends_on_all_values(tmp_path: Path) -> None:
    assert "PATH" in names(run(tmp_path, "repr(os.environ)"), "variable")


def test_a_socket_of_another_program_is_an_address(tmp_path: Path) -> None:
    text = (
        "for path in (there / 'their.s', server / 'our.s'):\n"
        "    s = socket.socket(socket.AF_UNIX); s.connect_ex(str(path))\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.sendto(b'', ('127.0.0.1', 9))\n"
    )
    found = run(tmp_path, text)
    assert names(found, "address") == {str(tmp_path / "there" / "their.s"), "127.0.0.1:9"}


def test_compiled_code_that_is_not_of_its_source_is_told(tmp_path: Path) -> None:
    """An edit that keeps size and time, as rsync and archives may: Python runs what was before."""
    text = (
        "other = ['import sys, os, py_compile; from pathlib import Path',\n"
        "  'source = Path(sys.argv[1]); before = source.stat(); py_compile.compile(str(source))',\n"
        "  'source.write_text(\"X = 2\")',\n"
        "  'os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))']\n"
        "source = there / 'in_there.py'; source.write_text('X = 1')\n"
        "subprocess.run([sys.executable, '-c', '; '.join(other), source], check=True)\n"
        "sys.path.append(str(there)); import in_there; assert in_there.X == 1\n"
    )
    stale = names(run(tmp_path, text), "stale")
    assert [os.path.basename(name).split(".")[0] for name in stale] == ["in_there"]  # noqa: PTH119


def test_compiled_code_of_its_source_is_not_told(tmp_path: Path) -> None:
    text = (
        "import py_compile; py_compile.compile(str(there / 'in_there.py'))\n"
        "sys.path.append(str(there)); import in_there; assert in_there.__cached__\n"
    )
    found = run(tmp_path, text)
    assert names(found, "stale") == set()
    assert str(tmp_path / "there" / "in_there.py") in names(found, "file")


def test_what_lies_loose_beside_distributions_is_noted(tmp_path: Path) -> None:
    """No version tells of it, as it does of pytest."""
    text = (
        "from ckpt_conformance.contract import installed; import site, sysconfig\n"
        "place = Path(sysconfig.get_paths()['purelib'])\n"
        "for name in ('loose_one.py', 'loose/data.txt', 'pytest/__init__.py', 'py.py'):\n"
        "    try: open(place / name)\n"
        "    except OSError: pass\n"
    )
    found = {name.rpartition("site-packages/")[2] for name in names(run(tmp_path, text), "file")}
    assert {"loose_one.py", "loose/data.txt"} <= found
    assert not found & {"pytest/__init__.py", "py.py"}


def test_what_a_run_writes_itself_and_what_is_installed_is_not_noted(tmp_path: Path) -> None:
    text = "(there / 'new').write_text('1'); (there / 'new').read_text(); import email.mime.text"
    found = run(tmp_path, text)
    assert str(tmp_path / "there" / "new") not in names(found, "file")
    assert not [name for name in names(found, "file") if "email" in name]


def test_compiled_code_elsewhere_stands_for_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "elsewhere"))
    text = (
        "subprocess.run([sys.executable, '-m', 'py_compile', str(there / 'in_there.py')])\n"
        "sys.path.append(str(there)); import in_there, email\n"
        "assert in_there.__cached__.startswith(sys.pycache_prefix)\n"
    )
    found = names(run(tmp_path, text), "file")
    assert str(tmp_path / "there" / "in_there.py") in found
    assert not [name for name in found if "email" in name or "/elsewhere/" in name]


def test_an_interpreter_that_multiprocessing_starts_is_a_program(tmp_path: Path) -> None:
    text = (
        "import multiprocessing as m\n"
        "p = m.get_context('spawn').Process(target=int); p.start(); p.join()\n"
    )
    assert sys.executable in names(run(tmp_path, text), "program")


def test_a_note_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A limit of the size of files, as a check of a full disk has it."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    assert not run(tmp_path, limit + "open(there / 'a.json')").is_whole


def test_no_notes_are_not_taken_for_nothing_opened(tmp_path: Path) -> None:
    assert not opened.read(tmp_path, "theirs").is_whole


MANY = """
import glob, shutil, tomllib, zipfile
from ctypes import cdll
json.load(open(there / 'a.json')); (there / 'b').write_text('x')
os.mkdir(there / 'folder'); shutil.copy(there / 'a.json', there / 'folder' / 'copy')
for path in (there / 'a.json', there / 'in_there.py'): path.read_bytes()
zipfile.ZipFile(there / 'z.zip', 'w').close(); zipfile.ZipFile(there / 'z.zip').namelist()
sys.path.insert(0, str(there)); importlib.import_module('in_' + 'there')
io.FileIO(there / 'a.json').close(); os.close(os.open('there/liby.so.1', os.O_RDONLY))
try: open(there / 'absent.toml', 'rb')
except OSError: pass
"""
READ = re.compile(r'openat\(AT_FDCWD[^,]*, "([^"]+)", O_RDONLY(?!\S*O_DIRECTORY)')


def source_of(name: str) -> str:
    """Return the text that compiled code was made of: an edit of it is what matters."""
    return importlib.util.source_from_cache(name) if "__pycache__" in name else name


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_every_file_that_a_tracer_sees_is_noted(tmp_path: Path) -> None:
    log = tmp_path / "strace"
    words = ("strace", "-f", "-qq", "-e", "trace=openat", "-o", str(log))
    found = run(tmp_path, MANY, *words)
    there = str(tmp_path / "there")
    opens = READ.findall(log.read_text())
    below = {os.path.join(tmp_path, name) for name in opens}  # noqa: PTH118
    below = {source_of(name) for name in below if name.startswith(f"{there}/")}
    own = {f"{there}/z.zip", f"{there}/folder/copy"}  # which the run wrote
    assert len(below) >= 5
    assert below - own - names(found, "file") == set()


def test_notes_are_lines_of_json(tmp_path: Path) -> None:
    run(tmp_path, "open(there / 'a.json')")
    others = {opened.LOST, opened.BEGUN, opened.EVERYBODY}
    logs = [p for p in (tmp_path / "server" / opened.FOLDER).iterdir() if p.name not in others]
    assert json.loads(logs[0].read_text().splitlines()[-1])["kind"] == "file"
