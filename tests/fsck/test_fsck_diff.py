"""Two checkpoints compared: what is the same is silent, and every difference is told exactly."""

from __future__ import annotations

import json
import re
import shutil
import tracemalloc
import warnings
from typing import TYPE_CHECKING, Any

import fsck_corpus
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.compare import Difference, Status
from ckpt_conformance.fsck.diff.diff import Compared, Options, diff
from ckpt_conformance.fsck.judge.judge import judge
from ckpt_conformance.fsck.source.findings import State
from ckpt_conformance.report import diff_lines

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("fsck")

DTYPES = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.int8, torch.int64, torch.bool),
]


def saved(path: Path, state: Any) -> Path:  # noqa: ANN401  whatever torch saves
    torch.save(state, path)
    return path


def saved_dcp(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)
    return path


def statuses(compared: Compared) -> dict[str, Status]:
    return {one.name: one.status for one in compared.differences}


def only(compared: Compared) -> Difference:
    assert compared.is_judged, (compared.a.problems, compared.b.problems)
    (found,) = compared.differences
    return found


def renames(*pairs: tuple[str, str]) -> Options:
    return Options(tuple((re.compile(pattern), new) for pattern, new in pairs))


# -- what is no payload ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, "1"), (-1, "-1"), (1.5, "1.5"), (True, "True"), (None, "None")],
)
@pytest.mark.parametrize("value", [torch.ones(3), 7, {"deep": torch.ones(3)}])
def test_keys_of_other_types_differ(a: Any, b: str, value: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """A load that asks for the one does not find the other."""
    left = saved(tmp_path / "a.pt", {"states": {a: value}})
    right = saved(tmp_path / "b.pt", {"states": {b: value}})
    found = only(diff(left, right))
    assert found.status is Status.KEY
    assert type(a).__name__ in str(found.a)
    assert "str" in str(found.b)
    assert (
        only(diff(left, right, renames((r"^states\.", "other."), (r"^other\.", "states."))))
        == found
    )
    assert diff(left, left).differences == []


def test_keys_that_a_format_does_not_keep_are_the_same(tmp_path: Path) -> None:
    """DCP joins all keys to a text."""
    state = {"state": {0: {"exp_avg": torch.ones(3)}}}
    one = saved(tmp_path / "a.pt", state)
    assert diff(one, saved_dcp(tmp_path / "dcp", state)).differences == []


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda one: one.requires_grad_()])
def test_what_gets_a_gradient_differs_from_what_gets_none(wrap: Any, tmp_path: Path) -> None:  # noqa: ANN401
    left = saved(tmp_path / "a.pt", {"w": wrap(torch.ones(3))})
    right = saved(tmp_path / "b.pt", {"w": torch.ones(3)})
    found = only(diff(left, right))
    assert (found.status, found.a, found.b) == (
        *(Status.GRAD, "requires_grad=True", "requires_grad=False"),
    )
    frozen = saved(tmp_path / "c.pt", {"w": torch.nn.Parameter(torch.ones(3), requires_grad=False)})
    assert diff(right, frozen).differences == []
    assert diff(left, frozen).counts["requires-grad-differs"] == 1
    other = saved(tmp_path / "d.pt", {"w": torch.zeros(3)})
    assert {one.status for one in diff(left, other).differences} == {Status.GRAD, Status.DIFFERS}


def test_safetensors_says_nothing_of_gradients(tmp_path: Path) -> None:
    left = saved(tmp_path / "a.pt", {"w": torch.nn.Parameter(torch.ones(3))})
    save_file({"w": torch.ones(3)}, tmp_path / "b.safetensors")
    assert diff(left, tmp_path / "b.safetensors").differences == []


# -- the same state in different formats -----------------------------------------------------------


def test_the_same_state_is_the_same_in_every_format(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    model = torch.load(corpus["torch"] / "checkpoint-5.pt")["model"]
    for a, b, options in (
        (corpus["torch"], corpus["dcp"], Options()),
        (corpus["safetensors"], corpus["hf-index"], Options()),
        (
            saved(tmp_path / "m.pt", {"model": model}),
            corpus["hf-index"],
            renames((r"^model\.", "")),
        ),
        (
            corpus["reference"] / "model_000005.pt",
            corpus["reference-dcp"] / "dcp_000005",
            Options(),
        ),
    ):
        before = trees.listing(a) if a.is_dir() else None
        compared = diff(a, b, options)
        assert compared.is_judged, (compared.a.problems, compared.b.problems)
        assert compared.differences == [], (a, b)
        assert len(compared.same) >= 6
        assert before is None or trees.listing(a) == before


def test_shards_of_four_ranks_are_compared_with_one_file(
    corpus: dict[str, Path], tmp_path: Path
) -> None:
    """The workers of the corpus draw these numbers: seed 0, in this order."""
    torch.manual_seed(0)
    state = {"rows": torch.randn(10, 6), "blocks": torch.randn(8, 6), "same": torch.randn(5)}
    state["step"] = 5
    assert diff(corpus["dcp-4-ranks"], saved(tmp_path / "one.pt", state)).differences == []
    state["blocks"][5, 3] += 1
    state["blocks"][7, 0] += 2
    found = only(diff(corpus["dcp-4-ranks"], saved(tmp_path / "two.pt", state)))
    assert (found.name, found.count, found.first) == ("blocks", 2, (5, 3))
    assert found.distance.max_abs == pytest.approx(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_any_dtype_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (24 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).reshape(2, 3, 4)
    other = value.clone()
    other.view(torch.uint8)[1, 2, dtype.itemsize] ^= 1
    a, b = saved(tmp_path / "a.pt", {"w": value}), saved_dcp(tmp_path / "step_1", {"w": other})
    found = only(diff(a, b))
    assert (found.status, found.count, found.first) == (Status.DIFFERS, 1, (1, 2, 1))
    assert found.elements == 24
    assert diff(a, saved_dcp(tmp_path / "step_2", {"w": value})).differences == []


def test_nan_payloads_and_signed_zeros_are_bits(tmp_path: Path) -> None:
    one = torch.tensor([0x7FC00000, 0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    two = torch.tensor([0x7FC00000, 0x7FC00001, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    found = only(diff(saved(tmp_path / "a.pt", [one]), saved(tmp_path / "b.pt", [two])))
    assert (found.name, found.count, found.first) == ("0", 2, (1,))
    assert (found.distance.max_abs, found.distance.max_ulps, found.distance.nans) == (0.0, 0, 1)


def test_views_are_compared_by_what_they_show(tmp_path: Path) -> None:
    """Strides, offsets and shared storages are how a file says it, not what it says."""
    base = torch.arange(3 * 700 * 500, dtype=torch.float32).reshape(3, 700, 500)
    views = {
        "t": base.permute(2, 0, 1),
        "part": base[1:, 3:600:7, 10:20],
        "wide": torch.arange(5.0).expand(4, 5),
        "bare": base[2, 1, 1],
    }
    plain = {key: one.contiguous() for key, one in views.items()}
    a, b = saved(tmp_path / "a.pt", views), saved(tmp_path / "b.pt", plain)
    assert diff(a, b).differences == []
    plain["t"][499, 2, 699] = -1
    found = only(diff(a, saved(tmp_path / "c.pt", plain)))
    assert (found.name, found.count, found.first) == ("t", 1, (499, 2, 699))


def test_the_ranks_of_the_reference_have_the_same_names_but_for_the_optimizer(
    repository: Path,
) -> None:
    """Per-rank files hold the optimizer of each rank, a DCP one of all."""
    golden = repository / "tests" / "golden" / "ranks-schema-2"
    compared = diff(golden / "model" / "model_000002.pt", golden / "dcp" / "dcp_000002")
    apart = {each.name for each in compared.differences if each.a is None or each.b is None}
    assert {name.partition(".")[0] for name in apart} <= {"optim"}
    assert any(name.startswith("rank1.rng.") for name in compared.same)


# -- values ----------------------------------------------------------------------------------------


def test_plain_values_are_compared_with_their_types(tmp_path: Path) -> None:
    a = {"step": 5, "lr": 0.0, "flag": True, "betas": (1, 2), "ids": list(range(50)), "gone": None}
    b = {"step": 6, "lr": -0.0, "flag": 1, "betas": [1, 2], "ids": [*range(49), 0], "new": {}}
    compared = diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    assert statuses(compared) == {
        **dict.fromkeys(("step", "lr", "flag", "betas", "ids"), Status.DIFFERS),
        "gone": Status.ONLY_A,
        "new": Status.ONLY_B,
    }
    told = {one.name: (one.a, one.b) for one in compared.differences}
    assert told["flag"] == ("True", "1")
    assert told["ids"] == ("item 49 of 50: 49", "item 49: 0")
    assert told["new"] == (None, "{}")


def test_generators_and_optimizers_are_compared(tmp_path: Path) -> None:
    """What only a pickle can say: numpy's arrays and scalars, torch's dtypes, a class of nobody."""
    state = {
        "numpy": np.random.default_rng(3).bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(),
        "dtype": torch.bfloat16,
        "scalar": np.float64(2.5),
    }
    a = saved(tmp_path / "a.pt", state)
    assert diff(a, saved(tmp_path / "b.pt", state)).differences == []
    state["legacy"] = np.random.RandomState(4).get_state()
    state["scalar"] = np.float64(2.25)
    state["dtype"] = torch.float16
    changed = statuses(diff(a, saved(tmp_path / "c.pt", state)))
    assert {name.partition(".")[0] for name in changed} == {"legacy", "scalar", "dtype"}


def test_dtype_shape_and_kind_are_told_apart(tmp_path: Path) -> None:
    a = {"d": torch.ones(2), "s": torch.ones(2), "k": torch.ones(()), "o": torch.ones(0, 3)}
    b = {"d": torch.ones(2).half(), "s": torch.ones(2, 1), "k": 1.0, "o": torch.ones(0, 3)}
    compared = diff(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    assert statuses(compared) == {"d": Status.DTYPE, "s": Status.SHAPE, "k": Status.KIND}
    assert compared.same == ["o"]


def test_other_files_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two")):
        folder = tmp_path / name / "checkpoint-5"
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"size": len(name)}))
        (folder / "vocab.txt").write_text(text)
    compared = diff(tmp_path / "a", tmp_path / "b")
    found = only(compared)
    assert (found.name, found.count, found.first) == ("vocab.txt", 3, (0,))
    assert compared.same == ["config.size", "w"]


@pytest.mark.parametrize("sort", ["deep", "recursive"])
def test_what_is_too_deep_is_not_compared_and_not_damaged(sort: str, tmp_path: Path) -> None:
    state: Any = {"w": torch.ones(2)}
    if sort == "deep":
        for _ in range(300):
            state = [state]
    else:
        state["self"] = state
    path = saved(tmp_path / "model.pt", state)
    assert judge(path).state is State.WHOLE
    compared = diff(path, saved(tmp_path / "other.pt", {"w": torch.ones(2)}))
    (problem,) = compared.a.problems
    assert "more than 200 levels, or a part of itself" in problem
    told = "\n".join(diff_lines.lines(compared))
    assert "  not compared  " in told
    assert "nothing is damaged" in told


# -- renames, and what is left out -----------------------------------------------------------------


def test_renames_follow_each_other_and_must_match(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pt", {"module.w": torch.ones(2), "module.b": torch.zeros(1)})
    b = saved_dcp(tmp_path / "step_3", {"net": {"weight": torch.ones(2), "b": torch.zeros(1)}})
    assert len(diff(a, b).differences) == 4
    right = renames((r"^module\.", "net."), (r"\.w$", ".weight"))
    assert diff(a, b, right).differences == []
    for wrong, why in (
        (renames(("modul_", "x")), "matches no name of A"),
        (renames((r"module\..", "x")), "one name"),
        (renames(("module", r"\9")), "malformed"),
    ):
        with pytest.raises(RequestError, match=why):
            diff(a, b, wrong)


def test_only_keeps_what_matches(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pt", {"model": {"w": torch.ones(2)}, "step": 1})
    b = saved(tmp_path / "b.pt", {"model": {"w": torch.ones(2)}, "step": 2})
    assert diff(a, b, Options(only=(re.compile("^model"),))).differences == []
    assert len(diff(a, b).differences) == 1
    with pytest.raises(RequestError, match="nothing to compare"):
        diff(a, b, Options(only=(re.compile("absent"),)))


def test_a_run_of_several_checkpoints_is_a_choice(corpus: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"2 checkpoints; name one of .*dcp_000005"):
        diff(corpus["reference-dcp"], corpus["dcp"])
    with pytest.raises(RequestError, match="nothing here looks like"):
        diff(tmp_path, corpus["dcp"])
    with pytest.raises(RequestError, match="does not exist"):
        diff(tmp_path / "absent", corpus["dcp"])


# -- damage ----------------------------------------------------------------------------------------


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit where these bytes are."""
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("layout", ["torch", "dcp"])
def test_a_difference_that_damage_made_is_told_as_damage(
    layout: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus[layout], copy)
    value = torch.load(corpus["torch"] / "checkpoint-5.pt")["model"]["2.weight"]
    file = max(trees.files(copy), key=lambda one: one.stat().st_size)
    flip(file, value.numpy().tobytes())
    compared = diff(copy, corpus["torch"])
    assert not compared.is_judged
    assert compared.b.problems == []
    (problem,) = compared.a.problems
    assert "CRC-32" in problem
    assert "model.2.weight" in problem
    assert statuses(compared) == {"model.2.weight": Status.DIFFERS}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("layout", fsck_corpus.WRITERS)
def test_a_side_that_is_cut_short_is_not_compared(
    layout: str, side: int, corpus: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus[layout], copy)
    names = [one for one in trees.files(copy) if "000002" not in str(one.relative_to(copy))]
    file = max(names, key=lambda one: one.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    step = {"reference": "model_000005.pt", "reference-dcp": "dcp_000005"}.get(layout, "")
    both = [copy / step, corpus[layout] / step]
    compared = diff(both[side], both[1 - side])
    assert not compared.is_judged
    damaged, whole = (compared.a, compared.b) if side == 0 else (compared.b, compared.a)
    assert any(file.name in one for one in damaged.problems), damaged.problems
    assert whole.problems == []


def test_an_item_that_is_another_tensor_is_damage(tmp_path: Path) -> None:
    """Same length, other dtype: the metadata and the archive contradict each other."""
    one = saved_dcp(tmp_path / "step_1", {"w": torch.ones(4)})
    two = saved_dcp(tmp_path / "step_2", {"w": torch.ones(4, dtype=torch.int32)})
    shutil.copyfile(two / "__0_0.distcp", one / "__0_0.distcp")
    compared = diff(saved(tmp_path / "a.pt", {"w": torch.ones(4)}), one)
    assert not compared.is_judged
    (problem,) = compared.b.problems
    assert "__0_0.distcp" in problem


@pytest.mark.slow
def test_lists_inside_of_lists_do_not_fill_the_memory(tmp_path: Path) -> None:
    nested: Any = [torch.ones(1)]
    for _ in range(40):
        nested = [nested, nested]
    path = saved(tmp_path / "a.pt", nested)
    compared = diff(path, path)
    assert not compared.is_judged
    assert "more than" in compared.a.problems[0]


def test_memory_is_bounded_by_tiles(tmp_path: Path) -> None:
    """Two files of 64 MiB, one of them turned round: a few tiles are in memory, no more."""
    value = torch.arange(16 << 20, dtype=torch.float32).reshape(4096, 4096)
    a = saved(tmp_path / "a.pt", {"w": value})
    value = value.clone()
    value[4000, 7] = -1
    b = saved(tmp_path / "b.pt", {"w": value.t().contiguous().t()})
    del value
    tracemalloc.start()
    try:
        found = only(diff(a, b))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.count, found.first) == (1, (4000, 7))
    assert most < 40 << 20
