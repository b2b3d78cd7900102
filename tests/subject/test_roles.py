"""Roles of files, found in what a manager wrote under names that nobody knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ckpt_conformance.harness.messages import PayloadSample
from ckpt_conformance.harness.strata import Role
from ckpt_conformance.subject import roles

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = bytes(range(64))


def golden(tmp_path: Path, files: dict[str, bytes], *, samples: int = 1) -> Any:  # noqa: ANN401  as much of it as is read
    """Two saves: `#` in a name or in bytes is the step."""
    for step in (2, 4):
        for saved in (2, step):
            for name, data in files.items():
                path = tmp_path / str(step) / name.replace("#", str(saved))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.replace(b"#", str(saved).encode()))
    return SimpleNamespace(
        saves=(2, 4),
        snapshot=lambda step: tmp_path / str(step),
        payload_samples={4: [PayloadSample("model/w", WEIGHTS[:16].hex(), 64)] * samples},
    )


def test_roles_follow_from_bytes_and_from_what_changes(tmp_path: Path) -> None:
    files = {
        "a#": b"head" + WEIGHTS,
        "b#": b"lists a# by its name",
        "c#": b"some numbers",
        "now": b"#",
        "always": b"the same",
    }
    assert roles.of_step(golden(tmp_path, files), 4) == {
        "a#": Role.PAYLOAD,
        "b#": Role.MANIFEST,
        "c#": Role.METADATA,
        "now": Role.POINTER,
    }


def test_a_file_of_a_folder_is_named_by_its_last_name(tmp_path: Path) -> None:
    files = {"s#/x.bin": WEIGHTS, "s#/y": b"x.bin"}
    found = roles.of_step(golden(tmp_path, files), 4)
    assert found == {"s#/x.bin": Role.PAYLOAD, "s#/y": Role.MANIFEST}


def test_one_small_file_that_is_written_over_is_payload(tmp_path: Path) -> None:
    files = {"all": WEIGHTS + b"#"}
    assert roles.of_step(golden(tmp_path, files), 4) == {"all": Role.PAYLOAD}


def test_where_no_tensor_is_found_most_bytes_are_payload(tmp_path: Path) -> None:
    files = {"a#": b"z" * 90, "b#": b"z" * 30}
    found = roles.of_step(golden(tmp_path, files, samples=0), 4)
    assert found == {"a#": Role.PAYLOAD, "b#": Role.METADATA}
    assert roles.most_bytes({"a": 4, "b": 4, "c": 4}) == {"a", "b"}
