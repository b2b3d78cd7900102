"""Which part may import which: the arrows of ARCHITECTURE.md, read from the source."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = "ckpt_conformance"
FOLDERS = {"suites", "fault_injectors", "reference_impl"}  # subpackages that lie beside the package
CORE_DEPENDENCIES = {"torch", "numpy", "pytest", "_pytest", "hypothesis", "faker"}

# What each layer may import of the project; `top` is TOP, below.
ALLOWED = {
    "top": {"top", "suites", "mutants", "adapters", "fault_injectors", "core", "reference_impl"},
    "suites": {"suites", "fault_injectors", "core"},
    "mutants": {"mutants", "adapters", "core", "reference_impl"},
    "adapters": {"adapters", "core"},
    "adapters.reference": {"adapters", "core", "reference_impl"},
    "fault_injectors": {"fault_injectors", "core"},
    "core": {"core"},
    "reference_impl": {"reference_impl"},
}

# What each layer may import of others when it is itself imported; anything more, inside a function.
AT_IMPORT = {
    "top": CORE_DEPENDENCIES | {"typer", "rich", "click", "jinja2", "markupsafe"},
    "reference_impl": {"torch", "numpy", "fsspec", "blake3"},
}
EVER_IN_REFERENCE = AT_IMPORT["reference_impl"]

# The plugin, the command line and what they write; each with its parts, such as cli_certify.
PLUGIN = ("plugin", "outcomes", "session")
WRITERS = ("certificate", "baseline", "report", "site", "docs")
TOP = ("cli", "__main__", *PLUGIN, *WRITERS)


@dataclass(frozen=True)
class Import:
    where: str
    layer: str
    target: str  # dotted
    at_import: bool  # runs when the module is imported: not in a function, not for types only
    relative: bool

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


def layer_of(dotted: str) -> str:
    """Give the layer of a module of the package, by its dotted name."""
    parts = dotted.split(".")[1:]
    if not parts:
        return "core"
    if parts[0] == "adapters" and len(parts) > 1 and parts[1].startswith("reference"):
        return "adapters.reference"
    if parts[0] in {*FOLDERS, "mutants", "adapters"}:
        return parts[0]
    is_top = any(parts[0] == name or parts[0].startswith(f"{name}_") for name in TOP)
    return "top" if is_top else "core"


def module_of(path: Path) -> str | None:
    """Give the dotted run-time name of a file of the package, None for other files."""
    parts = list(path.with_suffix("").parts)
    if parts[0] in FOLDERS:
        parts.insert(0, PACKAGE)
    if parts[0] != PACKAGE:
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(node: ast.AST, *, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Walk with the knowledge of whether a statement runs at import."""
    for child in ast.iter_child_nodes(node):
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        runs = at_import and not lazy and not (isinstance(child, ast.If) and is_for_types(child))
        yield child, runs
        yield from statements(child, at_import=runs)


def targets(node: ast.AST) -> list[str]:
    """Name what a statement imports; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names_modules = module in {PACKAGE, f"{PACKAGE}.adapters"}
        return [f"{module}.{alias.name}" for alias in node.names] if names_modules else [module]
    return []


def imports_of(source: str, path: Path) -> Iterator[Import]:
    layer = layer_of(module_of(path) or "")
    for node, runs in statements(ast.parse(source)):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for target in targets(node):
            where = f"{path}:{getattr(node, 'lineno', 0)} imports {target}"
            yield Import(where, layer, target, runs, relative)


@pytest.fixture(scope="module")
def imports(repository: Path, python_files: list[Path]) -> list[Import]:
    """Every import statement of the package."""
    return [
        each
        for path in python_files
        if module_of(path)
        for each in imports_of((repository / path).read_text(encoding="utf-8"), path)
    ]


def is_ours(each: Import) -> bool:
    return each.root == PACKAGE


def is_foreign(each: Import) -> bool:
    return not (is_ours(each) or each.root in sys.stdlib_module_names)


def crosses(each: Import) -> bool:
    """Whether an import goes against the arrows."""
    target = layer_of(each.target).partition(".")[0]
    is_version = each.target in {PACKAGE, f"{PACKAGE}.__version__"}
    return is_ours(each) and target not in ALLOWED[each.layer] and not is_version


def is_heavy(each: Import) -> bool:
    """Whether a foreign package that not everybody has is imported too early."""
    allowed = AT_IMPORT.get(each.layer, CORE_DEPENDENCIES)
    return is_foreign(each) and each.at_import and each.root not in allowed


def test_the_arrows_run_one_way(imports: list[Import]) -> None:
    wrong = [f"{each.where}, from {each.layer}" for each in imports if crosses(each)]
    assert not wrong, "\n".join(wrong)


def test_what_is_an_extra_is_imported_when_it_is_used(imports: list[Import]) -> None:
    """The core dependencies are enough to import every module; managers are imported lazily."""
    wrong = [each.where for each in imports if is_heavy(each)]
    assert not wrong, "\n".join(wrong)


def test_the_reference_manager_stands_alone(imports: list[Import]) -> None:
    wrong = [
        each.where
        for each in imports
        if each.layer == "reference_impl" and is_foreign(each)
        if each.root not in EVER_IN_REFERENCE
    ]
    assert not wrong, "\n".join(wrong)


def test_everything_is_imported_by_its_full_name(
    repository: Path, python_files: list[Path]
) -> None:
    """`suites.x` or a relative import would be a second copy of a module, or nothing in a wheel."""
    wrong = [
        each.where
        for path in python_files
        for each in imports_of((repository / path).read_text(encoding="utf-8"), path)
        if each.root in FOLDERS or each.relative
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reference_impl/manager.py", "from ckpt_conformance.workload.digests import digest"),
        ("fault_injectors/torn.py", "import ckpt_conformance.suites.test_smoke"),
        ("suites/test_x.py", "from ckpt_conformance import adapters"),
        (
            "ckpt_conformance/subject/subject.py",
            "def f():\n    from ckpt_conformance.mutants import o01",
        ),
        ("ckpt_conformance/subject/subject.py", "from ckpt_conformance.cli.main import main"),
        ("ckpt_conformance/adapters/torch_save.py", "import ckpt_conformance.reference_impl"),
    ],
)
def test_an_arrow_the_wrong_way_is_seen(name: str, source: str, tmp_path: Path) -> None:
    path = (tmp_path / name).relative_to(tmp_path)
    assert [each for each in imports_of(source, path) if crosses(each)]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("suites/test_x.py", "from ckpt_conformance.fault_injectors.torn import Torn"),
        ("ckpt_conformance/report/files.py", "from ckpt_conformance import __version__"),
        ("ckpt_conformance/adapters/reference.py", "import ckpt_conformance.reference_impl.meta"),
        ("ckpt_conformance/cli_certify.py", "import ckpt_conformance.mutants"),
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
