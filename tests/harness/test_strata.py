"""Strata of calls: a sort of call at one role of file, by kinds of names alone."""

from __future__ import annotations

import random

from ckpt_conformance.harness.messages import SeenCall
from ckpt_conformance.harness.strata import Role, Stratum, draw_left_out, of_calls

ROLES = {
    "w_#.bin": Role.PAYLOAD,
    "i_#.json": Role.MANIFEST,
    "d_#/part": Role.PAYLOAD,
    "now": Role.POINTER,
}


def stratum_of(what: str, path: str, *, became: str = "", is_folder: bool = False) -> Stratum:
    call = SeenCall(call=1, what=what, path=path, became=became, is_folder=is_folder)
    return next(iter(of_calls([call], ROLES)))


def test_calls_of_one_sort_at_files_of_one_role_are_alike() -> None:
    assert stratum_of("openat", "w_4.bin") == stratum_of("pwrite64", "w_12.bin")
    assert stratum_of("write", "w_4.bin") != stratum_of("write", "i_4.json")
    assert stratum_of("fsync", "now") == ("sync", Role.POINTER)
    assert stratum_of("write", "a stranger") == ("data", Role.OTHER)


def test_a_temporary_file_has_the_role_of_its_later_name() -> None:
    assert stratum_of("write", "tmp_77", became="i_4.json") == ("data", Role.MANIFEST)


def test_what_concerns_a_folder_is_none_of_its_files() -> None:
    assert stratum_of("fsync", "", is_folder=True) == ("sync", Role.DIRECTORY)
    assert stratum_of("mkdir", "d_4") == ("mkdir", Role.DIRECTORY)


def test_a_rename_gives_a_name_or_takes_it_away() -> None:
    """A commit and a withdrawal are both renames of a manifest."""
    assert stratum_of("rename", "tmp_77", became="i_4.json") == ("name", Role.MANIFEST)
    assert stratum_of("rename", "i_2.json", became="gone_77") == ("set aside", Role.MANIFEST)


def test_a_file_in_a_folder_that_was_renamed_keeps_its_role() -> None:
    assert stratum_of("unlink", "dead_d_4/part") == ("remove", Role.PAYLOAD)


def test_one_of_each_group_is_drawn_unless_one_was_chosen() -> None:
    rng = random.Random(0)  # noqa: S311
    assert draw_left_out([["a", "b"], ["c"]], {"b"}, rng) == ["c"]
    assert draw_left_out([["c"], ["c", "d"]], (), rng) == ["c"], "it stands for both groups"
    (drawn,) = draw_left_out([["a", "b"]], (), rng)
    assert drawn in {"a", "b"}
