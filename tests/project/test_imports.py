"""Which room may import which: the arrows of ARCHITECTURE.md, read from the source.

Every import counts: those for types only, and those inside of functions, too.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("imports")  # they share the parsed files
PACKAGE = "ckpt_conformance"
BESIDE = {"suites", "fault_injectors", "reference_impl"}  # subpackages that lie beside the package
DIVIDED = {"crash", "fsck"}  # rooms that consist of rooms
CORE_DEPENDENCIES = {"torch", "numpy", "pytest", "_pytest", "hypothesis", "faker", "msgspec"}

# What each room may import, from the top to the bottom: a room stands above all that it imports.
# So there is no cycle between rooms.
ALLOWED = {
    "cli": {
        *(
            "report",
            "plugin",
            "cluster",
            "work",
            "mutants",
            "fault_injectors",
            "subject",
            "harness",
        ),
        *("crash.script", "crash.explore", "crash.model", "trace", "processes", "contract"),
        *("fsck.diff", "fsck.judge", "fsck.source", "reference_impl"),
    },
    "report": {
        *("plugin", "mutants", "crash.explore", "subject", "contract"),
        *("fsck.diff", "fsck.judge", "fsck.source"),
    },
    "plugin": {"work", "subject", "harness", "processes", "contract"},
    "cluster": {"work", "processes", "contract"},
    "work": {"contract"},
    "suites": {
        *("suites.controls", "crash.explore", "schedules", "fault_injectors", "subject"),
        *("harness", "contract"),
    },
    "suites.controls": {"fault_injectors", "subject", "harness", "contract"},
    "crash.script": {
        *("crash.explore", "crash.model", "subject", "harness", "workload", "trace"),
        *("processes", "contract"),
    },
    "crash.explore": {
        *("crash.model", "fault_injectors", "subject", "harness", "workload", "trace"),
        *("processes", "contract"),
    },
    "crash.model": {"trace", "contract"},
    "schedules": {"subject", "harness", "trace", "contract"},
    "fault_injectors": {"subject", "harness", "workload", "trace", "processes", "contract"},
    "mutants": {"adapters.reference", "harness", "contract", "reference_impl"},
    "adapters.reference": {"subject", "contract", "reference_impl"},
    "adapters": {"workload", "contract"},
    "subject": {"harness", "workload", "processes", "contract"},
    "harness": {"workload", "trace", "processes", "contract"},
    "workload": {"contract"},
    "trace": {"processes", "contract"},
    "fsck.diff": {
        *("fsck.judge", "fsck.contents", "fsck.layouts", "fsck.formats", "fsck.pickled"),
        *("fsck.source", "contract"),
    },
    "fsck.judge": {
        *("fsck.contents", "fsck.layouts", "fsck.code", "fsck.formats", "fsck.pickled"),
        *("fsck.source", "contract"),
    },
    "fsck.contents": {"fsck.layouts", "fsck.formats", "fsck.pickled", "fsck.source"},
    "fsck.layouts": {"fsck.code", "fsck.formats", "fsck.source", "contract"},
    "fsck.code": {"fsck.formats", "fsck.pickled", "fsck.source"},
    "fsck.formats": {"fsck.pickled", "fsck.source"},
    "fsck.pickled": {"fsck.source"},
    "fsck.source": {"contract"},
    "contract": set[str](),
    "processes": set[str](),
    "reference_impl": set[str](),
}

# What a room may import of others when it is itself imported; anything more, inside a function.
WRITERS = CORE_DEPENDENCIES | {"typer", "rich", "click", "jinja2", "markupsafe"}
AT_IMPORT = {
    "cli": WRITERS,
    "report": WRITERS,
    "plugin": WRITERS,
    "reference_impl": {"torch", "numpy", "fsspec", "blake3"},
}
EVER_IN_REFERENCE = AT_IMPORT["reference_impl"] | {"lark"}


@dataclass(frozen=True)
class Import:
    where: str
    room: str
    target: str  # dotted
    at_import: bool  # runs when the module is imported: not in a function, not for types only
    relative: bool

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


def room_of(dotted: str) -> str:
    """Give the room of a module of the package, by its dotted name; the package itself is none."""
    parts = dotted.split(".")[1:]
    if not parts or parts[0].startswith("__version__"):
        return ""
    if parts == ["__main__"]:
        return "cli"
    if parts[:2] == ["suites", "controls"]:
        return "suites.controls"
    if parts[0] == "adapters" and len(parts) > 1 and parts[1].startswith("reference"):
        return "adapters.reference"
    return ".".join(parts[: 2 if parts[0] in DIVIDED else 1])


def module_of(path: Path) -> str | None:
    """Give the dotted run-time name of a file of the package, None for other files."""
    parts = list(path.with_suffix("").parts)
    if parts[0] in BESIDE:
        parts.insert(0, PACKAGE)
    if parts[0] != PACKAGE:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(node: ast.AST, *, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Walk with the knowledge of whether a statement runs at import; no expression imports."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        runs = at_import and not lazy and not (isinstance(child, ast.If) and is_for_types(child))
        yield child, runs
        yield from statements(child, at_import=runs)


def targets(node: ast.AST) -> list[str]:
    """Name what a statement imports; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names_rooms = module == PACKAGE or module.removeprefix(f"{PACKAGE}.") in {
            *DIVIDED,
            "adapters",
            "suites",
        }
        return [f"{module}.{alias.name}" for alias in node.names] if names_rooms else [module]
    return []


def imports_of(source: str, path: Path) -> Iterator[Import]:
    room = room_of(module_of(path) or "")
    for node, runs in statements(ast.parse(source)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for target in targets(node):
            where = f"{path}:{getattr(node, 'lineno', 0)} imports {target}"
            yield Import(where, room, target, runs, relative)


@pytest.fixture(scope="module")
def everywhere(repository: Path, python_files: list[Path]) -> dict[Path, list[Import]]:
    """Every import statement of every file."""
    return {
        path: list(imports_of((repository / path).read_text(encoding="utf-8"), path))
        for path in python_files
    }


@pytest.fixture(scope="module")
def imports(everywhere: dict[Path, list[Import]]) -> list[Import]:
    """Every import statement of the package."""
    return [each for path, found in everywhere.items() if module_of(path) for each in found]


def is_ours(each: Import) -> bool:
    return each.root == PACKAGE


def is_foreign(each: Import) -> bool:
    return not (is_ours(each) or each.root in sys.stdlib_module_names)


def crosses(each: Import) -> bool:
    """Whether an import goes against the arrows."""
    target = room_of(each.target)
    if not is_ours(each) or target in {"", each.room}:
        return False
    return target not in ALLOWED.get(each.room, ())


def is_heavy(each: Import) -> bool:
    """Whether a foreign package that not everybody has is imported too early."""
    allowed = AT_IMPORT.get(each.room, CORE_DEPENDENCIES)
    return is_foreign(each) and each.at_import and each.root not in allowed


def test_the_arrows_run_one_way(imports: list[Import]) -> None:
    wrong = [f"{each.where}, from {each.room or PACKAGE}" for each in imports if crosses(each)]
    assert not wrong, "\n".join(wrong)


def pictured(page: str) -> dict[str, set[str]]:
    """Read the picture of rooms of ARCHITECTURE.md: what stands right of each room's arrow."""
    picture = next(part for part in page.split("```") if " -> " in part)
    lines = re.sub(r",\n +", ", ", picture).splitlines()
    found: dict[str, set[str]] = {}
    for line in lines:
        names, arrow, right = line.partition("->")
        places = re.findall(r"[a-z_.]+", names)
        rooms = [name for name in places if name in ALLOWED][-1 if arrow else 0 :]
        found |= {room: set(re.findall(r"[a-z_.]+", right)) for room in rooms}
    return found


def test_the_picture_shows_the_arrows(repository: Path) -> None:
    """ARCHITECTURE.md says in a sentence which rooms import `contract`."""
    page = (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert pictured(page) == {room: ALLOWED[room] - {"contract"} for room in ALLOWED}
    apart = {room for room, targets in ALLOWED.items() if "contract" not in targets}
    assert apart == {
        *("fsck.contents", "fsck.code", "fsck.formats", "fsck.pickled"),
        *("contract", "processes", "reference_impl"),
    }


def test_a_room_stands_above_what_it_imports() -> None:
    """So no cycle of rooms can be allowed by a mistake in the table."""
    order = list(ALLOWED)
    wrong = [
        f"{room} imports {target}, which stands above it"
        for room, targets in ALLOWED.items()
        for target in targets
        if order.index(target) <= order.index(room)
    ]
    assert wrong == []


def test_every_module_is_in_a_room_and_every_arrow_is_used(imports: list[Import]) -> None:
    """A module at the root would have no rule; an arrow that nothing needs is one too many."""
    rooms = {each.room for each in imports}
    assert rooms <= {*ALLOWED, ""}
    used = {(each.room, room_of(each.target)) for each in imports}
    unused = {(room, target) for room in ALLOWED for target in ALLOWED[room]} - used
    assert unused == set()


def test_no_suite_imports_another(imports: list[Import]) -> None:
    """A check that others stand on is in `suites.controls`; what suites share has no checks."""
    wrong = [
        each.where
        for each in imports
        if each.room == "suites" and each.target.startswith(f"{PACKAGE}.suites.test_")
    ]
    assert wrong == []


def test_what_is_an_extra_is_imported_when_it_is_used(imports: list[Import]) -> None:
    """The core dependencies are enough to import every module; managers are imported lazily."""
    wrong = [each.where for each in imports if is_heavy(each)]
    assert not wrong, "\n".join(wrong)


def test_the_reference_manager_stands_alone(imports: list[Import]) -> None:
    wrong = [
        each.where
        for each in imports
        if each.room == "reference_impl" and is_foreign(each)
        if each.root not in EVER_IN_REFERENCE
    ]
    assert not wrong, "\n".join(wrong)


def test_everything_is_imported_by_its_full_name(everywhere: dict[Path, list[Import]]) -> None:
    """`suites.x` or a relative import would be a second copy of a module, or nothing in a wheel."""
    found = [each for path in everywhere for each in everywhere[path]]
    wrong = [each.where for each in found if each.root in BESIDE or each.relative]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reference_impl/manager.py", "from ckpt_conformance.workload.digests import digest"),
        ("fault_injectors/torn.py", "import ckpt_conformance.suites.test_smoke"),
        ("suites/test_x.py", "from ckpt_conformance import adapters"),
        ("suites/controls/test_x.py", "from ckpt_conformance.suites import layouts"),
        ("ckpt_conformance/subject/x.py", "def f():\n    from ckpt_conformance.mutants import o01"),
        ("ckpt_conformance/subject/x.py", "from ckpt_conformance.cli.main import main"),
        ("ckpt_conformance/adapters/torch_save.py", "import ckpt_conformance.reference_impl"),
        ("ckpt_conformance/crash/model/x.py", "from ckpt_conformance.crash import explore"),
        (
            "ckpt_conformance/trace/x.py",
            "if TYPE_CHECKING:\n    from ckpt_conformance.harness.client import Client",
        ),
        ("ckpt_conformance/x.py", "from ckpt_conformance.contract import journal"),
    ],
)
def test_an_arrow_the_wrong_way_is_seen(name: str, source: str, tmp_path: Path) -> None:
    path = (tmp_path / name).relative_to(tmp_path)
    assert [each for each in imports_of(source, path) if crosses(each)]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("suites/test_x.py", "from ckpt_conformance.fault_injectors.torn import Torn"),
        ("suites/test_x.py", "from ckpt_conformance.suites.controls import test_smoke"),
        ("ckpt_conformance/report/files.py", "from ckpt_conformance import __version__"),
        ("ckpt_conformance/adapters/reference.py", "import ckpt_conformance.reference_impl.meta"),
        ("ckpt_conformance/cli/certify.py", "import ckpt_conformance.mutants"),
        ("ckpt_conformance/crash/explore/x.py", "from ckpt_conformance.crash.model import states"),
        ("ckpt_conformance/mutants/x.py", "from ckpt_conformance.adapters import reference"),
    ],
)
def test_an_arrow_the_right_way_is_let_pass(name: str, source: str, tmp_path: Path) -> None:
    path = (tmp_path / name).relative_to(tmp_path)
    assert not [each for each in imports_of(source, path) if crosses(each)]


def test_an_early_import_is_told_from_a_late_one(tmp_path: Path) -> None:
    path = (tmp_path / "ckpt_conformance/adapters/x.py").relative_to(tmp_path)
    early = "try:\n    import accelerate\nexcept ImportError:\n    pass"
    late = "def open():\n    import accelerate\nif TYPE_CHECKING:\n    import lightning"
    assert [each for each in imports_of(early, path) if is_heavy(each)]
    assert not [each for each in imports_of(late, path) if is_heavy(each)]
