"""What is recorded of the functions that a package's processes enter."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.harness import reach

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = {
    "__init__.py": "",
    "deep/__init__.py": "def inside(): pass",
    "work.py": '''
        """A module."""
        from __future__ import annotations
        import functools

        def plain():
            """Only a docstring."""

        def outer():
            def inner(): return (yield_ for yield_ in ())
            return inner()

        def lazy():
            yield 1

        def of_lambda():
            return (lambda: (yield))

        async def later(): pass

        class Base:
            @property
            def value(self): return 1
            @staticmethod
            def fixed(): raise ValueError(__import__("sys")._getframe().f_lineno)
            def __init__(self): pass
            class Inner:
                def method(self): pass
    ''',
}
NAMES = [
    "pkg.deep:inside",
    "pkg.work:plain",
    "pkg.work:outer",
    "pkg.work:lazy",
    "pkg.work:of_lambda",
    "pkg.work:later",
    "pkg.work:Base.value",
    "pkg.work:Base.fixed",
    "pkg.work:Base.__init__",
    "pkg.work:Base.Inner.method",
]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> reach.FunctionTable:
    for name, text in PACKAGE.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return reach.FunctionTable.of("pkg")


def run(
    folder: Path, marks: reach.Marks, code: str, *, statements: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that marks what it enters of `pkg`."""
    begin = f"""
        import os, signal, sys, threading
        from pathlib import Path
        sys.path.insert(0, {str(folder)!r})
        from ckpt_conformance.harness import reach
        reach.install(Path({str(marks.path)!r}), "pkg", statements={statements})
    """
    text = textwrap.dedent(begin) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60
    )


def test_functions_are_read_from_the_texts(table: reach.FunctionTable) -> None:
    assert sorted(table.names) == sorted(NAMES)
    assert table.lazy == {"pkg.work:lazy", "pkg.work:later"}


@pytest.mark.parametrize(
    ("code", "entered"),
    [
        ("import pkg.work", set[str]()),
        ("import pkg.work as w; w.plain()", {"plain"}),
        ("import pkg.work as w; w.outer()", {"outer"}),
        ("import pkg.work as w; w.Base().value", {"Base.__init__", "Base.value"}),
        ("import pkg.work as w; w.Base.Inner().method()", {"Base.Inner.method"}),
        ("import pkg.work as w; w.lazy()", set[str]()),
        ("import pkg.work as w; next(w.lazy())", {"lazy"}),
        ("import pkg.work as w; threading.Thread(target=w.plain).start()", {"plain"}),
        ("import pkg.work as w; os.fork() or (w.plain(), os._exit(0)); os.wait()", {"plain"}),
        ("import pkg.work as w; w.plain(); os.kill(os.getpid(), signal.SIGKILL)", {"plain"}),
    ],
)  # fmt: skip
def test_what_is_entered_is_marked(
    code: str, entered: set[str], table: reach.FunctionTable, tmp_path: Path
) -> None:
    marks = reach.Marks(tmp_path / "marks", table)
    done = run(tmp_path, marks, code)
    assert done.returncode in (0, -9), done.stderr
    assert marks.entered() == {f"pkg.work:{name}" for name in entered}


IN_ANOTHER = """
    import subprocess
    import pkg.work as w
    code = "import sys; sys.path.insert(0, {path!r}); {first}"
    code += "from ckpt_conformance.harness import reach; "
    code += "reach.inherit(); import pkg.work as w; w.plain(); import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code])
"""


def test_a_new_interpreter_marks_too(table: reach.FunctionTable, tmp_path: Path) -> None:
    """A child that is no fork: of an adapter that must not be forked, or of another hash seed."""
    marks = reach.Marks(tmp_path / "marks", table)
    done = run(tmp_path, marks, IN_ANOTHER.format(path=str(tmp_path), first=""))
    assert done.returncode == 0, done.stderr
    assert marks.entered() == {"pkg.work:plain"}


def test_one_that_has_the_package_already_marks_all(
    table: reach.FunctionTable, tmp_path: Path
) -> None:
    marks = reach.Marks(tmp_path / "marks", table)
    run(tmp_path, marks, IN_ANOTHER.format(path=str(tmp_path), first="import pkg;"))
    assert marks.entered() == set(table.names)


STATEMENTS = '''
    def branches(x):
        """Words."""
        if x:
            yes = 1
        else:
            no = 1
        try:
            for one in x:
                one / 0
        except ZeroDivisionError:
            caught = 1
        finally:
            last = 1

        def inner():
            never = 1
        return inner
'''


@pytest.mark.parametrize(
    ("argument", "lines"),
    [("[]", {4, 7, 8, 9, 14, 16, 18}), ("[1]", {4, 5, 8, 9, 10, 12, 14, 16, 18})],
)
def test_statements_that_are_run_are_marked(
    argument: str, lines: set[int], table: reach.FunctionTable, tmp_path: Path
) -> None:
    del table  # the package
    (tmp_path / "pkg" / "work.py").write_text(textwrap.dedent(STATEMENTS))
    known = reach.FunctionTable.of("pkg", statements=True)
    assert "pkg.work:branches#4" in known.names
    marks = reach.Marks(tmp_path / "marks", known)
    code = f"import pkg.work as w; w.branches({argument}); sys.exit(w.branches.__doc__ != 'Words.')"
    done = run(tmp_path, marks, code, statements=True)
    assert done.returncode == 0, done.stderr
    entered = marks.entered()
    assert entered == {
        "pkg.work:branches",
        *(reach.place("pkg.work:branches", line) for line in lines),
    }
    groups = reach.grouped(entered)
    assert len(groups) == 1
    assert set(reach.lines_of(groups)) == {("pkg.work:branches", line) for line in lines}


def test_functions_alone_are_grouped_as_they_are() -> None:
    assert reach.grouped({"a:f", "a:g"}) == {"a:f", "a:g"}
    assert not list(reach.lines_of({"a:f"}))


def test_marks_are_cleared_in_place(table: reach.FunctionTable, tmp_path: Path) -> None:
    """A process that has the file mapped goes on marking in it."""
    marks = reach.Marks(tmp_path / "marks", table)
    code = """
        import pkg.work as w
        w.plain()
        print("first", flush=True)
        sys.stdin.readline()
        w.outer()
    """
    text = textwrap.dedent(code)
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    begin += "from pathlib import Path\nfrom ckpt_conformance.harness import reach\n"
    begin += f"reach.install(Path({str(marks.path)!r}), 'pkg')\n"
    with subprocess.Popen(
        [sys.executable, "-c", begin + text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        assert marks.entered() == {"pkg.work:plain"}
        marks.clear()
        process.stdin.write("\n")
        process.stdin.flush()
    assert marks.entered() == {"pkg.work:outer"}


def test_lines_of_a_traceback_stay(table: reach.FunctionTable, tmp_path: Path) -> None:
    done = run(
        tmp_path, reach.Marks(tmp_path / "marks", table), "import pkg.work as w; w.Base.fixed()"
    )
    text = (tmp_path / "pkg" / "work.py").read_text().splitlines()
    number = next(at for at, line in enumerate(text, 1) if "def fixed" in line)
    assert f"ValueError: {number}\n" in done.stderr


def test_a_package_that_was_imported_before_is_refused(
    table: reach.FunctionTable, tmp_path: Path
) -> None:
    marks = reach.Marks(tmp_path / "marks", table)
    code = "reach.install(Path(sys.argv[0] or '.') / 'x', 'ckpt_conformance.harness')"
    assert (
        "RuntimeError: ckpt_conformance.harness was imported before"
        in run(tmp_path, marks, code).stderr
    )


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no package 'no_such_package'"):
        reach.FunctionTable.of("no_such_package")
