"""What a module may run is read from its text."""

from __future__ import annotations

import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ckpt_conformance.work import own_code, sources
from ckpt_conformance.work.sources import SourceTree


def tree_of(folder: Path, **texts: str) -> SourceTree:
    """Write modules of a package `p`: by name, with `__` for the folder that one lies in."""
    for name, text in {"init": "", **texts}.items():
        path = folder / "p" / f"{name.replace('__', '/').replace('init', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceTree.of_packages({"p": folder / "p"})


@pytest.mark.parametrize(
    "text",
    [
        "import p.b",
        "from p import b",
        "from p.b import thing",
        "from . import b",
        "from .b import thing",
        "def f():\n    from p import b",
        "def f():\n    import importlib\n    importlib.import_module('p.b')",
        "PROBE = 'p.b:function'",
        "def f(name):\n    return f'p.b:{name}'",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import p.b",
        "try:\n    import p.b\nexcept ImportError:\n    pass",
    ],
)
def test_a_module_that_may_be_imported_is_found(text: str, tmp_path: Path) -> None:
    tree = tree_of(tmp_path, a=text, b="", c="")
    assert tree.closure(["p.a"]) == {"p", "p.a", "p.b"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "if TYPE_CHECKING:\n    from p import b",
        "import typing\nif typing.TYPE_CHECKING:\n    import p.b",
        '"""Reads what p.b wrote."""',
        "def f():\n    '''See p.b.'''",
        "import q.b, json",
        "# p.b",
    ],
)
def test_a_module_that_is_only_mentioned_is_not(text: str, tmp_path: Path) -> None:
    tree = tree_of(tmp_path, a=text, b="", c="")
    assert tree.closure(["p.a"]) == {"p", "p.a"}


def test_the_closure_goes_through_packages(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, a="import p.x.y", x__init="from p import c", x__y="", c="", d="")
    assert tree.closure(["p.a"]) == {"p", "p.a", "p.x", "p.x.y", "p.c"}


def test_a_cycle_ends(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, a="import p.b", b="import p.a")
    assert tree.closure(["p.a"]) == tree.closure(["p.b"]) == {"p", "p.a", "p.b"}


def test_a_digest_changes_with_each_text_and_with_nothing_else(tmp_path: Path) -> None:
    before = tree_of(tmp_path, a="import p.b", b="x = 1", c="y = 1")
    chosen = before.closure(["p.a"])
    after_c = tree_of(tmp_path, a="import p.b", b="x = 1", c="y = 2")
    assert before.digest(chosen) == after_c.digest(chosen)
    after_b = tree_of(tmp_path, a="import p.b", b="x = 2", c="y = 1")
    assert before.digest(chosen) != after_b.digest(chosen)
    assert before.digest(sorted(chosen)) == before.digest(sorted(chosen, reverse=True))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with code of many kinds, and a folder on the path beside it."""
    for name in (*SEEN, *NOT_SEEN):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("X = 1\n")
    (tmp_path / "here" / "env" / "pyvenv.cfg").touch()
    (tmp_path / "here" / "reports" / "report.html").touch()
    (tmp_path / "here" / "reports" / "result.json").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.syspath_prepend(tmp_path / "here")  # as the command line has it
    return tmp_path


SEEN = (
    "here/adapter.py",
    "here/beside.py",  # which is imported by a name that is put together
    "here/namespace/deep/flag.py",  # no __init__.py
    "here/tool.sh",
    "here/libx.so",
    "path/other/core.py",
    "path/sitecustomize.py",
)
NOT_SEEN = (
    "here/.git/hook.py",
    "here/env/lib/package.py",
    "here/reports/bundles/CKC/repro.py",
    "here/data.bin",
    "elsewhere/module.py",
)


@pytest.mark.parametrize("name", SEEN)
def test_code_that_may_be_imported_counts_however_it_is_named(outside: Path, name: str) -> None:
    before = sources.code_outside()
    assert sources.code_outside() == before
    (outside / name).write_text("X = 2\n")
    assert sources.code_outside() != before


@pytest.mark.parametrize("name", NOT_SEEN)
def test_what_is_no_code_of_the_users_does_not_count(outside: Path, name: str) -> None:
    before = sources.code_outside()
    (outside / name).write_text("X = 2\n")
    assert sources.code_outside() == before


def test_where_there_is_too_much_code_nothing_is_ever_the_same(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_code, "MOST_FILES", len(list(outside.rglob("*.py"))) // 2)
    assert sources.code_outside() != sources.code_outside()


BESIDE = {name.removeprefix("here/") for name in SEEN if name.startswith("here/")}


def test_all_code_beside_an_adapter_is_named_with_its_path_below_that_folder(outside: Path) -> None:
    """Also what it imports by a name that it puts together; but no other folder of the path."""
    before = sources.code_beside(["adapter"])
    assert before.keys() == BESIDE
    assert sources.code_beside(["namespace.deep.flag"]) == before  # a folder without __init__.py
    (outside / "here" / "beside.py").write_text("X = 2\n")
    after = sources.code_beside(["adapter"])
    assert {name for name in BESIDE if after[name] != before[name]} == {"beside.py"}


def test_what_an_adapter_names_elsewhere_brings_its_folder_along(outside: Path) -> None:
    (outside / "here" / "adapter.py").write_text("import other.core\n")
    beside = sources.code_beside(["adapter"])
    assert beside.keys() == BESIDE | {"other/core.py", "sitecustomize.py"}


def test_evidence_of_this_suite_is_no_code_of_the_users(outside: Path) -> None:
    before = sources.code_beside(["adapter"])
    for marker in ("violation.json", "recorded.json"):
        folder = outside / "here" / "parts" / marker.partition(".")[0]
        folder.mkdir(parents=True)
        (folder / marker).touch()
        (folder / "repro.py").touch()
    assert sources.code_beside(["adapter"]) == before


def test_what_is_installed_or_ours_or_broken_or_absent_has_no_code_beside_it(outside: Path) -> None:
    assert sources.code_beside(["msgspec", "json", "ckpt_conformance.adapters", "no_such"]) == {}
    (outside / "here" / "adapter.py").write_text("def (\n")
    assert sources.code_beside(["adapter"]).keys() == BESIDE


def test_where_there_is_too_much_code_what_is_named_counts(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "here" / "adapter.py").write_text("import beside\n")
    monkeypatch.setattr(own_code, "MOST_FILES", 2)
    assert sources.code_beside(["adapter"]).keys() == {"adapter.py", "beside.py"}


@pytest.fixture
def hidden_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a project whose code hides where a plain walk does not look."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "native", here / "bin", tmp_path / "linked", there):
        folder.mkdir(parents=True)
    added = f"import sys\nsys.path.append({str(there)!r})\nsys.path.insert(0, '{there}.zip')\n"
    (here / "adapter.py").write_text(f"{added}import named_elsewhere\n")
    (here / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "back").symlink_to(here)  # no walk may go round in it
    for name in HIDDEN:
        if name.endswith(".zip"):
            write_archive(tmp_path / name, "X = 1\n")
        else:
            (tmp_path / name).write_text("#!/bin/sh\n")
    (here / "bin" / "executable").chmod(0o755)
    (here / "bin" / "note").write_text("only a text\n")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    return tmp_path


def test_the_text_of_a_separator_is_no_folder_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter.py").write_text("import sys\nsys.path.append('/'.join(['a', 'b']))\n")
    monkeypatch.chdir(tmp_path)
    assert sources.with_added([tmp_path]) == [tmp_path]


HIDDEN = (
    "linked/code.py",
    "there/named_elsewhere.py",
    "there.zip",
    "here/sourceless.pyc",
    "here/native/liby.so.1",
    "here/native/liby.so.1.2.3",
    "here/bin/script",
    "here/bin/executable",
    "here/inside.zip",
)


def write_archive(path: Path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("in_archive.py", text)


def edit(path: Path) -> None:
    if path.suffix == ".zip":
        write_archive(path, "X = 2\n")
    else:
        path.write_text(path.read_text() + "# edited\n")


@pytest.mark.parametrize("name", HIDDEN)
def test_code_counts_wherever_it_hides(hidden_code: Path, name: str) -> None:
    outside, beside = sources.code_outside(), sources.code_beside(["adapter"])
    assert (outside, beside) == (sources.code_outside(), sources.code_beside(["adapter"]))
    edit(hidden_code / name)
    assert sources.code_outside() != outside
    changed = {
        file for file, digest in sources.code_beside(["adapter"]).items() if beside[file] != digest
    }
    assert [Path(file).name for file in changed] == [Path(name).name]


@pytest.mark.parametrize("name", ["in_archive.py", "in_package/__init__.py"])
def test_an_adapter_may_import_from_an_archive(
    hidden_code: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The archive counts whole, and no module of it is read by its path."""
    archive, top = hidden_code / "there.zip", name.partition("/")[0].removesuffix(".py")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(name, "X = 1\n")
    monkeypatch.syspath_prepend(archive)
    monkeypatch.setenv("PYTHONPATH", str(archive))
    (hidden_code / "here" / "adapter.py").write_text(f"import {top}\n")
    tree = sources.SourceTree({})
    assert tree.closure(["adapter"]) == {"adapter"}
    before = sources.code_outside()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(name, "X = 2\n")
    assert sources.code_outside() != before


def test_a_text_and_an_archive_of_data_are_no_code(hidden_code: Path) -> None:
    with zipfile.ZipFile(hidden_code / "here" / "data.zip", "w") as archive:
        archive.writestr("table.csv", "1")
    files = sources.code_beside(["adapter"])
    assert not {"data.zip", "bin/note"} & files.keys()


def test_a_link_to_a_folder_of_data_without_end_is_not_walked_to_its_end(
    hidden_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        (hidden_code / "linked" / f"{number}.bin").touch()
    monkeypatch.setattr(own_code, "MOST_NAMES", 50)
    assert sources.code_outside() != sources.code_outside()
    assert "adapter.py" in sources.code_beside(["adapter"])


@pytest.mark.parametrize("winner", ["m/__init__.py", f"m{EXTENSION_SUFFIXES[0]}", "m.abi3.so"])
def test_of_one_name_that_counts_which_python_imports(winner: str, tmp_path: Path) -> None:
    """A package, or compiled code, goes before a text of the same name."""
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "m.py").write_text("X = 1\n")
    before = SourceTree.of_packages({"p": package}).digest(["p.m"])
    (package / winner).parent.mkdir(exist_ok=True)
    (package / winner).write_text("X = 2\n")
    tree = SourceTree.of_packages({"p": package})
    assert tree.sources["p.m"].path == package / winner
    assert tree.digest(["p.m"]) != before
