"""Fsck on the Megatron layouts of verl: its documentation is held against the disk."""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import TYPE_CHECKING, Any

import megatron_layouts
import pytest
import torch

from ckpt_conformance.contract import trees
from ckpt_conformance.fault_injectors import at_rest
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.gate import judge_newest
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import Finding, Kind, State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckpt_conformance.fsck.source.findings import Report

# One worker writes the layouts, once.
pytestmark = pytest.mark.xdist_group("fsck-megatron")

STEP = f"global_step_{megatron_layouts.STEP}"
MANIFEST = "ckpt_contents.json"
WHOLE = ("v2", "v2-sharded")
# One of two files of the tokenizer says as much as both.
OPTIONAL = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every layout, undamaged."""
    base = tmp_path_factory.mktemp("megatron")
    return {name: write(base / name) for name, write in megatron_layouts.WRITERS.items()}


@pytest.fixture
def role(layouts: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the actor of a run in layout v2."""
    shutil.copytree(layouts["v2"], tmp_path / "run")
    return tmp_path / "run" / STEP / "actor"


def only(root: Path) -> Report:
    (report,) = judge(root).reports
    return report


def bad(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.kind is not Kind.NOTE]


# -- undamaged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_v2_is_recognised_and_nothing_is_said(name: str, layouts: dict[str, Path]) -> None:
    report = only(layouts[name])
    assert report.findings == []
    assert (report.layout, report.step, report.world_size) == ("verl-megatron", 100, 8)
    assert report.tensors > 4
    assert report.crc > 0


def test_one_role_may_be_named_alone(layouts: dict[str, Path]) -> None:
    role = only(layouts["v2"] / STEP / "actor")
    assert (role.layout, role.state, role.findings) == ("verl-megatron", State.WHOLE, [])
    compared = diff(layouts["v2"] / STEP / "actor", layouts["v2"] / STEP / "actor")
    assert compared.is_judged
    assert not compared.differences


def test_the_layout_before_v2_is_whole_and_remarked(layouts: dict[str, Path]) -> None:
    for root in (layouts["pre-v2"], layouts["pre-v2"] / STEP / "actor"):
        report = only(root)
        assert (report.layout, report.state) == ("verl-megatron-pre-v2", State.WHOLE)
        (remark,) = report.findings
        assert remark.kind is Kind.NOTE
        assert "migrate" in remark.what


@pytest.mark.parametrize("mode", ["hardlink", "symlink", "copy"])
def test_what_the_script_migrated_is_whole_and_remarked(mode: str, tmp_path: Path) -> None:
    """It writes no manifest, so "a manifest shows completeness" says nothing about these."""
    report = only(megatron_layouts.migrated(tmp_path, mode))
    assert (report.layout, report.state) == ("verl-megatron", State.WHOLE)
    said = [one for one in report.findings if "hard link" not in one.what]
    assert [one.file for one in said] == [f"actor/{MANIFEST}"]
    assert ("hard link" in " ".join(one.what for one in report.findings)) == (mode == "hardlink")


def test_megatrons_folder_alone_is_a_dcp(layouts: dict[str, Path]) -> None:
    for name in ("optimizer/dist_ckpt", "optimizer"):
        report = only(layouts["v2"] / STEP / "actor" / name)
        assert (report.layout, report.findings) == ("dcp", [])


# -- what is missing -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_every_missing_file_is_told(name: str, layouts: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(layouts[name], root)
    for path in sorted(trees.files(root / STEP)):
        if path.name in OPTIONAL:
            continue
        path.rename(tmp_path / "aside")
        report = only(root)
        (tmp_path / "aside").rename(path)
        assert report.state is State.INCOMPLETE, path
        assert path.relative_to(root / STEP).as_posix() in {one.file for one in bad(report)}, path
    assert only(root).findings == []


@pytest.mark.parametrize("folder", ["optimizer", "extra", "model/huggingface"])
def test_a_missing_folder_is_told(folder: str, role: Path) -> None:
    shutil.rmtree(role / folder)
    report = only(role.parent)
    assert report.state is State.INCOMPLETE
    assert any(one.file.startswith(f"actor/{folder}") for one in bad(report))


def test_a_missing_tokenizer_is_told(role: Path) -> None:
    for name in OPTIONAL:
        (role / "model" / "huggingface" / name).unlink()
    (missing,) = bad(only(role.parent))
    assert "tokenizer" in missing.what


def test_an_export_without_weights_is_incomplete(role: Path) -> None:
    """The configuration and the tokenizer are written first, the weights by the bridge."""
    for path in (role / "model" / "huggingface").glob("model*"):
        path.unlink()
    (missing,) = bad(only(role.parent))
    assert missing.file == "actor/model/huggingface/model.safetensors"
    body = megatron_layouts.manifest()
    body["backend"]["peft"] = True
    megatron_layouts.write_manifest(role, body)
    assert bad(only(role.parent)) == []  # then adapters are all that is exported


def test_a_save_killed_at_any_file_is_incomplete(layouts: dict[str, Path], role: Path) -> None:
    """Files come in verl's order and the manifest is the last; the step before is then served."""
    shutil.copytree(role.parent, role.parents[1] / "global_step_90")
    for path in trees.files(role.parents[1] / "global_step_90"):
        if path.name == MANIFEST:
            body = json.loads(path.read_text()) | {"global_step": 90}
            path.write_text(json.dumps(body))
    original = layouts["v2"] / STEP / "actor"
    order = sorted(trees.files(original), key=lambda one: one.stat().st_mtime_ns)
    for path in reversed(order):
        (role / path.relative_to(original)).unlink()
        judged = judge_newest(role.parents[1], Options(metadata_only=True))
        assert judged.newest_whole
        assert judged.newest_whole.step == 90, f"without {path} and what came after it"
        if path == order[1]:
            break  # one file alone, of a folder that is not there otherwise


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_a_migration_killed_at_any_file_is_incomplete(mode: str, tmp_path: Path) -> None:
    """Verl's script takes it as done from the first folder on, and its loader does not object."""
    whole = megatron_layouts.migrated(tmp_path / "whole", "hardlink") / STEP / "actor"
    parts = [whole / part / "dist_ckpt" for part in ("optimizer", "extra", "model")]
    links = [path for part in parts for path in sorted(trees.files(part))]
    role = megatron_layouts.pre_v2(tmp_path / "run") / STEP / "actor"
    shutil.rmtree(role / "dist_ckpt")
    shutil.copytree(whole / "dist_ckpt", role / "dist_ckpt")
    for path in links:
        copy = role / path.relative_to(whole)
        copy.parent.mkdir(parents=True, exist_ok=True)
        (os.link if mode == "hardlink" else shutil.copyfile)(role / "dist_ckpt" / path.name, copy)
        report = only(role.parent)
        assert report.state is State.INCOMPLETE, path
        assert any("migration did not end" in one.what for one in bad(report)), path
    (role / "huggingface").rename(role / "model" / "huggingface")
    assert only(role.parent).state is State.WHOLE


def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    link = megatron_layouts.migrated(tmp_path, "symlink") / STEP / "actor" / "extra" / "dist_ckpt"
    link.unlink()
    link.symlink_to(link.with_name("gone"))
    assert [one.what for one in bad(only(tmp_path))] == ["the link leads nowhere"]


# -- what is damaged -------------------------------------------------------------------------------


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda body: body.pop(key)


def setting(*keys: str, to: object) -> Callable[[dict[str, Any]], object]:
    """Set a value below some keys."""

    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return change


OUTSIDE = ["../critic", "/etc", "model/../../critic", "optimizer//dist_ckpt", "", "a\0b", 7, "./x"]
CONTRADICTIONS = [
    *((without(key), key) for key in megatron_layouts.manifest()),
    (setting("framework", to="fsdp"), "framework"),
    (setting("global_step", to=99), "of step 99, and the name says 100"),
    (setting("global_step", to="100"), "global_step"),
    (setting("world_size", to=0), "world_size"),
    (setting("role", to=None), "role"),
    (setting("save_contents", to=["models"]), "save_contents"),
    (setting("save_contents", to=["model", "optimizer"]), "save_contents no extra"),
    (setting("save_contents", to=["model", "extra"]), "save_contents no optimizer"),
    (lambda body: body["contents"].pop("optimizer"), "have no optimizer"),
    (lambda body: body["contents"].pop("rng_state"), "have no rng_state"),
    (lambda body: body["contents"].pop("transformer_config"), "have no transformer_config"),
    (lambda body: body["contents"].pop("model"), "have none"),
    (setting("contents", to={}), "contents are none"),
    (lambda body: body["directories"].pop("extra/dist_ckpt"), "directories do not list"),
    (setting("directories", to=[]), "directories are none"),
    (setting("saved_any_dist_ckpt", to=False), "saved_any_dist_ckpt is False"),
    (setting("backend", "has_bridge", to=False), "has no bridge"),
    (setting("backend", "peft", to="no"), "backend"),
    (setting("contents", "model", "format", to=None), "format of 'model'"),
    *((setting("contents", "model", "path", to=path), "path of 'model'") for path in OUTSIDE),
    (setting("directories", "../x", to="y"), "leads out"),
    (setting("contents", "model", "peft_adapter_path", to="/x"), "leads out"),
]


@pytest.mark.parametrize(("change", "told"), CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_damage(
    change: Callable[[dict[str, Any]], object], told: str, role: Path
) -> None:
    body = megatron_layouts.manifest()
    change(body)
    megatron_layouts.write_manifest(role, body)
    report = only(role.parent)
    assert report.state is State.DAMAGED
    words = [one.what for one in bad(report) if one.file == f"actor/{MANIFEST}"]
    assert any(told in one for one in words), words


def test_a_model_in_shards_that_the_backend_denies_is_damage(
    layouts: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(layouts["v2-sharded"], tmp_path / "run")
    role = tmp_path / "run" / STEP / "actor"
    body = json.loads((role / MANIFEST).read_text())
    body["backend"]["use_dist_checkpointing"] = False
    megatron_layouts.write_manifest(role, body)
    assert "its backend says that it is not" in bad(only(tmp_path / "run"))[0].what
    body["backend"]["peft"] = True  # then adapters are sharded
    megatron_layouts.write_manifest(role, body)
    assert bad(only(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("change", "kind", "file"),
    [
        (setting("schema_version", to=3), Kind.UNKNOWN, MANIFEST),
        (setting("schema_version", to="2"), Kind.DAMAGED, MANIFEST),
        (setting("contents", "optimizer", "path", to="optim"), Kind.MISSING, "optim"),
        (setting("contents", "transformer_config", "path", to="t.json"), Kind.MISSING, "t.json"),
        (setting("directories", "adapter", to="x"), Kind.MISSING, "adapter"),
        (
            setting("contents", "model", "peft_adapter_path", to="model/huggingface/adapter"),
            *(Kind.MISSING, "model/huggingface/adapter"),
        ),
        (
            setting("contents", "rng_state", "path", to="optimizer/dist_ckpt"),
            *(Kind.DAMAGED, "optimizer/dist_ckpt/.metadata"),
        ),
        (setting("contents", "model", "format", to="gguf"), Kind.UNKNOWN, "model/huggingface"),
    ],
)
def test_what_a_manifest_says_is_held_against_the_folder(
    change: Callable[[dict[str, Any]], object], kind: Kind, file: str, role: Path
) -> None:
    body = megatron_layouts.manifest()
    change(body)
    megatron_layouts.write_manifest(role, body)
    found = [(one.kind, one.file.removeprefix("actor/")) for one in only(role.parent).findings]
    assert (kind, file) in found, found


def test_swapped_folders_are_damage(role: Path) -> None:
    (role / "optimizer").rename(role / "aside")
    (role / "extra").rename(role / "optimizer")
    (role / "aside").rename(role / "extra")
    report = only(role.parent)
    assert report.state is State.DAMAGED
    assert "'lr_scheduler'" in report.findings[0].what


def test_a_link_out_of_the_checkpoint_is_damage(role: Path, tmp_path: Path) -> None:
    (role / "extra" / "dist_ckpt").rename(tmp_path / "elsewhere")
    (role / "extra" / "dist_ckpt").symlink_to(tmp_path / "elsewhere")
    report = only(role.parent)
    assert report.state is State.DAMAGED
    assert "actor/extra/dist_ckpt" in {one.file for one in bad(report)}


def test_what_the_manifest_does_not_name_is_remarked(role: Path) -> None:
    shutil.copytree(role / "extra" / "dist_ckpt", role / "model" / "dist_ckpt")
    report = only(role.parent)
    assert report.state is State.WHOLE
    assert [one.file for one in report.findings] == ["actor/model/dist_ckpt"]


def test_formats_of_megatron_that_are_not_known_ask_for_less(role: Path) -> None:
    folder = role / "extra" / "dist_ckpt"
    config = json.loads((folder / "metadata.json").read_text())
    (folder / "common.pt").unlink()
    for change, state in (
        ({"common_backend": "other"}, State.WHOLE),
        ({"sharded_backend": None, "common_backend": "other"}, State.DAMAGED),
        ({}, State.INCOMPLETE),
    ):
        (folder / "metadata.json").write_text(json.dumps(config | change))
        assert only(role.parent).state is state, change


@pytest.mark.parametrize("name", ["v2", "v2-sharded", "pre-v2", "migrated"])
@pytest.mark.parametrize("fault", ["bit-flip", "truncation-half", "zeroed-block"])
def test_damage_of_shards_is_found(
    fault: str, name: str, layouts: dict[str, Path], tmp_path: Path
) -> None:
    """One file of each kind in each folder: every record of them has a CRC."""
    for number, path in enumerate(sorted(trees.files(layouts[name]))):
        if path.suffix not in (".distcp", ".pt") or "critic" in path.parts:
            continue
        copy = tmp_path / str(number)
        file = path.relative_to(layouts[name]).as_posix()
        rng = random.Random(number)  # noqa: S311  which bits, no secret
        at_rest.copy_damaged(layouts[name], copy, fault, rng, file)
        assert only(copy).state is State.DAMAGED, (file, fault)


def leaves(tree: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401  JSON
    """Give (container, key) of every value that is a text or a number."""
    found: list[tuple[Any, Any]] = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found += leaves(value) if isinstance(value, dict | list) else [(tree, key)]
    return found


def test_every_edit_of_the_manifest_is_seen_but_what_nothing_repeats(role: Path) -> None:
    body, unseen = megatron_layouts.manifest(), set[str]()
    for holder, key in leaves(body):
        old = holder[key]
        holder[key] = not old if isinstance(old, bool) else old + 1 if old == 8 else f"{old}x"
        megatron_layouts.write_manifest(role, body)
        if only(role.parent).state is State.WHOLE:
            unseen.add(str(key))
        holder[key] = old
    descriptions = set(body["directories"])
    # `backend` is the one of the entry `model`; the two flags only contradict other contents.
    free = {"role", "arch", "world_size", "backend", "peft", "use_dist_checkpointing"}
    assert unseen == descriptions | free


def test_every_missing_key_of_an_entry_is_seen(role: Path) -> None:
    body = megatron_layouts.manifest()
    for entry in body["contents"].values():
        for key in ("path", "format"):
            old = entry.pop(key)
            megatron_layouts.write_manifest(role, body)
            assert only(role.parent).state is State.DAMAGED, (entry, key)
            entry[key] = old


@pytest.mark.parametrize("fault", ["truncation-half", "truncation-0", "non-utf8"])
@pytest.mark.parametrize("file", [MANIFEST, "extra/dist_ckpt/metadata.json"])
def test_damage_of_json_is_found(fault: str, file: str, role: Path, tmp_path: Path) -> None:
    rng = random.Random(3)  # noqa: S311  which bytes, no secret
    at_rest.copy_damaged(role, tmp_path / "copy", fault, rng, file)
    report = only(tmp_path / "copy")
    assert report.state is not State.WHOLE
    assert file in {one.file for one in bad(report)}


def test_a_script_of_somebodys_own_is_not_verls(tmp_path: Path) -> None:
    """Folders with such names, and none of Megatron's: there is no manifest to miss."""
    for name in ("model", "optimizer", "extra"):
        (tmp_path / "step_5" / name).mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, tmp_path / "step_5" / name / "state.pt")
    report = only(tmp_path)
    assert (report.layout, report.findings) == ("files", [])
