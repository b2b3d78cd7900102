"""How an adapter is named, and what is said of a name that is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.contract import AdapterBase, Capability, registry

if TYPE_CHECKING:
    from pathlib import Path

ADAPTER = """
from ckpt_conformance.contract import AdapterBase, Capability
def make():
    return AdapterBase(name="Mine", version="7", library="mylib")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder on the path: a package with an adapter, installed with entry points."""
    (tmp_path / "my_pkg_of_a_test").mkdir()
    (tmp_path / "my_pkg_of_a_test" / "__init__.py").write_text("")
    (tmp_path / "my_pkg_of_a_test" / "adapter.py").write_text(ADAPTER)
    (tmp_path / "my_pkg_of_a_test" / "spoilt.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "my_pkg_of_a_test" / "needy.py").write_text("import absent_of_a_test")
    facts = tmp_path / "my_pkg-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-pkg\nVersion: 1\n")
    lines = ["mine = my_pkg_of_a_test.adapter:make", "spoilt = my_pkg_of_a_test.spoilt:make"]
    lines += ["reference = my_pkg_of_a_test.adapter:make"]
    (facts / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("package")
def test_an_entry_point_is_an_adapter_by_name() -> None:
    found = registry.describe("mine")
    assert (found.name, found.title, found.version) == ("mine", "Mine", "7")
    assert registry.known().count("reference") == 1
    assert registry.describe("reference").title == "reference", "a bundled name stays bundled"


def test_list_adapters_shows_entry_points(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_conformance", "list", "adapters"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("mine ")] == [
        ["mine", "Mine;", "mylib", "7;", "manager;", "my_pkg_of_a_test.adapter:make"]
    ]
    assert "adapter 'spoilt' cannot be made: RuntimeError: at import" in " ".join(lines)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nope", "unknown adapter 'nope': known: reference, "),
        ("nope", "lightning. Your own manager is named as my_package.module:attribute."),
        ("refrence", "unknown adapter 'refrence': did you mean reference or "),
        ("my_pkg.adapter.make", "did you mean 'my_pkg.adapter:make'? Your own"),
        ("my_pkg.adapter", "did you mean 'my_pkg.adapter:make' or 'my_pkg:adapter'? Your own"),
        ("my_pkg/adapter.py:make", "such as 'my_pkg.adapter:make'"),
        ("my_pkg.adapter:", "such as 'my_pkg.adapter:make'"),
        (":make", "such as 'my_package.module:make'"),
    ],
)
def test_a_wrong_form_is_refused_before_anything_is_imported(name: str, told: str) -> None:
    with pytest.raises(registry.AdapterError) as refused:
        registry.check_name(name)
    assert told in str(refused.value)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_pkg_of_a_tset.adapter:make", "did you mean my_pkg_of_a_test? is it installed"),
        ("my_pkg_of_a_test.adaptr:make", "did you mean adapter? is it installed"),
        ("my_pkg_of_a_test.adapter:mak", "has no 'mak'; did you mean make?"),
        ("my_pkg_of_a_test.needy:make", "absent_of_a_test is missing where the suite runs"),
    ],
)
def test_a_wrong_module_gets_the_nearest(name: str, told: str) -> None:
    with pytest.raises(registry.AdapterError) as refused:
        registry.get(name)
    assert told in str(refused.value)


def test_every_known_form_passes() -> None:
    for name in (*registry.BUNDLED, "my_pkg.adapter:make", "m:a.b", "mutant:A1"):
        registry.check_name(name)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ({"saves_over": "no"}, "saves_over is 'no'; it may be True or False"),
        ({"min_keep": 0}, "min_keep is 0; it is a number of checkpoints, 1 or more"),
        ({"min_keep": True}, "min_keep is True; it is a number of checkpoints, 1 or more"),
        ({"max_keep": 0}, "max_keep is 0, min_keep is 1; it is a number of checkpoints, no fewer"),
        ({"min_keep": 3, "max_keep": 2}, "max_keep is 2, min_keep is 3; it is a number of"),
        (
            {"max_keep": 1, "capabilities": frozenset({Capability.EXPLICIT_STEP})},
            "max_keep is 1, so there is no step to choose: drop EXPLICIT_STEP",
        ),
    ],
)
def test_a_limit_that_nothing_can_keep_to_is_refused(
    limit: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("limited")
    module.make = lambda: AdapterBase(name="limited", version="1", **limit)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "limited", module)
    with pytest.raises(registry.AdapterError, match=re.escape(told)):
        registry.get("limited:make")


def test_a_refusal_names_the_adapter_once() -> None:
    ours = registry.Refusal.of_error(registry.AdapterError("adapter 'x' lacks 'open'"))
    theirs = registry.Refusal.of_error(ValueError("adapter of no kind"))
    assert ours.about("x") == "adapter 'x' lacks 'open'"
    assert theirs.about("x") == "adapter 'x' cannot be made: ValueError: adapter of no kind"
    assert str(ours) == "AdapterError: adapter 'x' lacks 'open'"


def test_a_part_of_the_suite_that_does_not_import_is_no_matter_of_an_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = ImportError("cannot import name 'durable'", name="ckpt_conformance.reference_impl")

    def fails(_: str) -> None:
        raise gone

    monkeypatch.setattr("importlib.import_module", fails)
    with pytest.raises(registry.AdapterError, match="this installation is not whole: pip install"):
        registry.get("reference")
