"""What a key of the cache says of packages: versions, and of what was built from a folder more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_conformance.work import packages

PLACE = "file:///home/me/proj%20one"


def install(site: Path, origin: object, digest: str, name: str = "theirs") -> list[str]:
    """Write what pip does for a distribution, as if it had been installed from somewhere."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    record = f"theirs/data.json,sha256={digest},2\n../../../bin/theirs,sha256={site.name},9\n"
    (info / "RECORD").write_text(f"{record}{info.name}/direct_url.json,sha256={site.name},9\n")
    if origin is not None:
        (info / packages.ORIGIN).write_text(json.dumps(origin))
    return packages.described([str(site)])


@pytest.mark.parametrize(
    "origin",
    [
        {"url": PLACE, "dir_info": {}},
        {"url": "https://host/theirs.whl", "archive_info": {}},
        {"url": "https://host/theirs.git", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
    ],
)
def test_what_was_built_from_a_folder_counts_by_its_files(origin: object, tmp_path: Path) -> None:
    """Its version may stay, as in CI; the place of the environment does not count."""
    first = install(tmp_path / "one", origin, "aa")
    assert first == install(tmp_path / "two", origin, "aa")
    assert first != install(tmp_path / "one", origin, "bb")


@pytest.mark.parametrize("origin", [None, {"url": PLACE, "dir_info": {"editable": True}}, [1]])
def test_other_packages_count_by_their_version(origin: object, tmp_path: Path) -> None:
    assert install(tmp_path, origin, "aa") == install(tmp_path, origin, "bb") == ["theirs 1.0"]


def test_the_folder_of_an_editable_project_is_known(tmp_path: Path) -> None:
    install(tmp_path, {"url": PLACE, "dir_info": {"editable": True}}, "aa")
    install(tmp_path, {"url": "file:///elsewhere", "dir_info": {}}, "aa", "other")
    assert packages.edited_in_place([str(tmp_path)]) == [Path("/home/me/proj one")]
