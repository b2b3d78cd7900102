"""The short part of the fuzz of fsck: some hundred inputs, always the same ones, by every rule.

The long part is `make fuzz-fsck`; both judge by `fuzz_judge`. That a rule can be broken is shown.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import fuzz_inputs  # noqa: E402  beside this file
import fuzz_judge  # noqa: E402
import fuzz_late  # noqa: E402
import fuzz_minimize  # noqa: E402
import fuzz_mutator  # noqa: E402
import fuzz_seeds  # noqa: E402

from ckpt_conformance.fsck.contents import leaves  # noqa: E402
from ckpt_conformance.fsck.formats import torch_file, zips  # noqa: E402
from ckpt_conformance.fsck.judge import judge as fsck_judge  # noqa: E402
from ckpt_conformance.fsck.judge import looks, parts  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("fuzz")

PER_PART, PARTS = 60, 5
LARGE = 60_000  # bytes of a seed that is left to the long part


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> fuzz_inputs.Seeds:
    built = fuzz_seeds.build(tmp_path_factory.mktemp("seeds"), is_quick=True)
    return fuzz_inputs.Seeds(one for one in built if sum(map(len, one.files.values())) < LARGE)


@pytest.fixture(scope="module")
def judge(
    seeds: fuzz_inputs.Seeds, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[fuzz_judge.Judge]:
    loader = fuzz_judge.Loader()
    yield fuzz_judge.Judge(tmp_path_factory.mktemp("fuzz"), seeds, loader)
    loader.close()


def keys(judge: fuzz_judge.Judge, one: fuzz_inputs.Input) -> list[str]:
    return [fault.key for fault in judge.check(one)]


def drawn(seeds: fuzz_inputs.Seeds, number: int) -> fuzz_inputs.Input:
    rng = random.Random(number)  # noqa: S311  a fuzz
    one = fuzz_mutator.fresh(seeds, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        one = fuzz_mutator.mutated(one, seeds, rng)
    return one


def test_what_libraries_wrote_breaks_no_rule(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge
) -> None:
    broken = {name: keys(judge, fuzz_inputs.Input(name)) for name in seeds.names}
    assert {name: found for name, found in broken.items() if found} == {}
    assert judge.counts.states.keys() >= {"whole", "unsafe", "unknown"}


def test_a_file_whose_time_runs_out_is_unknown(seeds: fuzz_inputs.Seeds, tmp_path: Path) -> None:
    """Whatever its format, and wherever its reader is then."""
    disk = fuzz_inputs.Disk(tmp_path, seeds)
    mild = [name for name in seeds.names if not name.startswith("unsafe")]
    late = {name: [*fuzz_late.problems(disk.put(fuzz_inputs.Input(name)))] for name in mild}
    assert {name: found for name, found in late.items() if found} == {}


@pytest.mark.parametrize("each", [1, 2], ids=["all", "every other one"])
def test_what_macos_keeps_beside_files_changes_no_verdict(
    each: int, seeds: fuzz_inputs.Seeds, tmp_path: Path
) -> None:
    disk = fuzz_inputs.Disk(tmp_path, seeds)
    changed: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    for name in seeds.names:
        paths = map(PurePosixPath, sorted(seeds.by_name[name].files)[::each])
        beside = {str(path.with_name(f"._{path.name}")): APPLE_DOUBLE for path in paths}
        usual, found = (states(disk.put(fuzz_inputs.Input(name, files))) for files in ({}, beside))
        if found != usual:
            changed[name] = usual, found
    assert changed == {}


APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(90)


def states(path: Path) -> dict[str, str]:
    """Judge the folder of what a seed is, which may be a file."""
    reports = fsck_judge.judge(path if path.is_dir() else path.parent).reports
    return {str(one.path): str(one.state) for one in reports}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_changed_files_break_no_rule(
    part: int, seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge
) -> None:
    for number in range(part * PER_PART, (part + 1) * PER_PART):
        one = drawn(seeds, number)
        again = fuzz_inputs.decode(fuzz_inputs.encode(one), seeds)
        assert again == one, "an input must be read as it was written"
        assert not judge.check(one), f"input {number}: {one.seed}, {sorted(one.files)}"


# -- the rules can be broken -----------------------------------------------------------------------


def evil(seeds: fuzz_inputs.Seeds) -> fuzz_inputs.Input:
    data = seeds.by_name["unsafe-01-zip"].files["model.pt"]
    return fuzz_inputs.Input("small-pt", {"small.pt": data}, is_blind=False)


def test_code_in_what_is_whole_is_seen(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys(judge, evil(seeds)) == []
    monkeypatch.setattr("ckpt_conformance.fsck.formats.torch_file.judge_names", lambda *_: ())
    monkeypatch.setattr(looks, "_names_of", lambda *_: [])
    assert any(key.startswith("runs: torch os.system") for key in keys(judge, evil(seeds)))
    assert not (Path.cwd() / "fuzz-canary").exists()


def flipped(seeds: fuzz_inputs.Seeds) -> fuzz_inputs.Input:
    """Flip a bit of a weight."""
    data = bytearray(seeds.by_name["small-pt"].files["small.pt"])
    data[data.index(b"\x00\x00\x80\x3f")] ^= 1
    return fuzz_inputs.Input("small-pt", {"small.pt": bytes(data)})


@pytest.mark.parametrize("name", [".metadata.tmp", ".metadatax"])
def test_a_copy_of_the_metadata_of_a_dcp_breaks_no_rule(
    name: str, seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge
) -> None:
    """It asks for the names of the metadata, which run nothing."""
    seed, path = next(
        (seed, path)
        for seed in seeds.names
        for path in sorted(seeds.by_name[seed].files)
        if path.rpartition("/")[2] == ".metadata"
    )
    data = seeds.by_name[seed].files[path]
    copy = path.removesuffix(".metadata") + name
    assert keys(judge, fuzz_inputs.Input(seed, {copy: data})) == []


def test_a_bit_under_a_crc_is_seen(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys(judge, flipped(seeds)) == []
    monkeypatch.setattr(parts, "works_of", lambda *_: [])
    assert "covered: torch small-pt" in keys(judge, flipped(seeds))


def test_a_load_that_fails_is_seen(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of a local header, where fsck looks at none."""
    own = seeds.by_name["small-pt"].files["small.pt"]
    one = fuzz_inputs.Input("small-pt", {"small.pt": b"XX" + own[2:]})
    assert keys(judge, one) == []
    monkeypatch.setattr(zips, "_local", fake_local)
    found = keys(judge, one)
    assert any(key.startswith("loads: torch torch ") for key in found), found


def fake_local(file: object, at: int, listed: object, name: str) -> int:
    """Read a local header, and hold it against nothing."""
    del listed, name
    sizes = zips.exactly(file, at + 26, 4)  # type: ignore[arg-type]
    return at + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")


def test_another_value_than_the_library_reads_is_seen(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes rows for columns."""
    own = seeds.by_name["small-pt"].files["small.pt"]
    one = fuzz_inputs.Input("mixed", {"step_5/model.pt": own}, is_blind=False)
    assert keys(judge, one) == []

    def turned(*args: Any) -> torch_file.Tensor:  # noqa: ANN401  those of what it stands for
        tensor = torch_file.tensor_of(*args)
        return replace(tensor, stride=tensor.stride[::-1])

    monkeypatch.setattr(leaves, "tensor_of", turned)
    assert "values: torch differs" in keys(judge, one)


def test_an_exception_and_a_document_that_fits_no_schema_are_seen(
    seeds: fuzz_inputs.Seeds, judge: fuzz_judge.Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("ckpt_conformance.fsck.judge.examine.judge_layout", fail)
    found = keys(judge, fuzz_inputs.Input("small-pt"))
    assert any(key.startswith("raises: judge KeyError in examine.py") for key in found), found
    monkeypatch.undo()
    monkeypatch.setattr(
        "ckpt_conformance.fsck.source.findings.Report.coverage", property(lambda _: 2.0)
    )
    assert any(key.startswith("schema: fsck") for key in keys(judge, fuzz_inputs.Input("small-pt")))
    assert seeds.names


def test_an_input_is_made_small(seeds: fuzz_inputs.Seeds) -> None:
    """Only the byte that matters stays changed, and only the file that has it."""
    own = seeds.by_name["mixed"].files["step_5/config.json"]
    changed = bytes(byte ^ 1 for byte in own)
    files = {"step_5/config.json": changed, "step_5/model.pt": b"x", "step_5/order.npy": None}
    one = fuzz_inputs.Input("mixed", files, options=3)

    def shows(other: fuzz_inputs.Input) -> bool:
        data = seeds.file(other, "step_5/config.json")
        return data is not None and data[5:6] == changed[5:6]

    less = fuzz_minimize.smaller(one, seeds, shows)
    assert list(less.files) == ["step_5/config.json"]
    data = less.files["step_5/config.json"]
    assert data is not None
    assert [at for at, byte in enumerate(data) if byte != own[at]] == [5]
    assert less.options == 0


def test_the_command_says_what_is_missing(tmp_path: Path, seeds: fuzz_inputs.Seeds) -> None:
    """And it runs nothing: where atheris is not there, no seed is written first."""
    hidden = (
        "import sys; sys.modules['atheris'] = None; sys.argv = ['fuzz', '--cache', sys.argv[1]]; "
    )
    run = f"sys.path.insert(0, {str(HERE)!r}); import fuzz_fsck; sys.exit(fuzz_fsck.main())"
    command = [sys.executable, "-c", hidden + run, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install -c constraints/dev.txt -e '.[fuzz]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert seeds.names


def test_a_kept_input_is_replayed(tmp_path: Path, seeds: fuzz_inputs.Seeds) -> None:
    cache, path = tmp_path / "cache", tmp_path / "one.input"
    (cache / "seeds").mkdir(parents=True)
    fuzz_inputs.save_seeds([seeds.by_name["small-pt"]], cache / "seeds")
    path.write_bytes(fuzz_inputs.encode(flipped(seeds)))
    import fuzz_fsck

    (cache / "seeds.stamp").write_text(fuzz_fsck.made_by())
    command = [
        sys.executable,
        str(HERE / "fuzz_fsck.py"),
        "--cache",
        str(cache),
        "--replay",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "small-pt" in done.stdout
