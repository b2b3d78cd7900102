"""Statements: how they are read, what they may say, and what an error shows."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from ckpt_conformance.reference_impl.resharding import (
    KeyMapping,
    ReshardError,
    StatementError,
    StateNames,
    TensorInfo,
    compile_mapping,
)
from ckpt_conformance.reference_impl.resharding.expand import MACROS, Macros
from ckpt_conformance.reference_impl.resharding.syntax import parse

if TYPE_CHECKING:
    from collections.abc import Mapping


def of(*shape: int, dtype: str = "float32", cuts: tuple[int, ...] = ()) -> TensorInfo:
    return TensorInfo(shape, dtype, cuts or (1,) * len(shape))


def mapped(
    statements: list[str], source: Mapping[str, TensorInfo], destination: Mapping[str, TensorInfo]
) -> KeyMapping:
    return compile_mapping(statements, source, destination)


def taken(mapping: KeyMapping) -> dict[str, tuple[str, ...]]:
    """Give the source tensors of each destination tensor."""
    return {key: view.keys for key, view in mapping.views.items()}


ERNIE = (
    "ernie.layers.\\$LAYER_ID.self_attn.qkv_proj.weight -> "
    "ernie.layers.\\$LAYER_ID.self_attn.qkv_proj.weight, fused_qkv, num_heads=20, "
    "num_key_value_groups=5"
)


def test_a_statement_of_the_document() -> None:
    """Names, a flag, two numbers; a backslash before the `$` is YAML's (P046, P047, P048)."""
    (one,) = parse([ERNIE])
    name = "ernie.layers.$LAYER_ID.self_attn.qkv_proj.weight"
    assert [each.text for each in (*one.left, *one.right)] == [name, name]
    assert one.attributes.fused == "fused_qkv"
    assert (one.attributes.num_heads, one.attributes.num_key_value_groups) == (20, 5)


def test_lines_and_comments() -> None:
    """A text may hold several statements; each ends with its line (P050)."""
    found = parse(["# what changes\na -> b\n\nc->_\n", "  d -> e  "])
    assert [(one.number, one.text) for one in found] == [(1, "a -> b"), (2, "c->_"), (3, "d -> e")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model.0.w -> x", "model.0.w"),
        ("a-b/c_d -> x", "a-b/c_d"),
        ("'odd name, x' -> x", "odd name, x"),
        ('"fused_qkv" -> x', "fused_qkv"),
        ("axis -> x, axis=0", "axis"),
        ("fused_qkv2 -> x", "fused_qkv2"),
        ("w[0:2] -> x, axis=0", "w[0:2]"),
    ],
)
def test_names(text: str, name: str) -> None:
    """Also those of attributes, where they stand as names."""
    (one,) = parse([text])
    assert one.left[0].text == name


@pytest.mark.parametrize("written", ["[1, 0]", "'[1,0]'", '"[1, 0]"'])
def test_an_order_of_dimensions(written: str) -> None:
    (one,) = parse([f"a -> b, permute={written}, dtype=bfloat16"])
    assert (one.attributes.permute, one.attributes.dtype) == ((1, 0), "bfloat16")


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("a b -> c", 3, "unexpected 'b'; "),
        ("a ->", 5, "it ends here; a name"),
        ("-> c", 1, "unexpected '->'; a name"),
        ("a", 2, "it ends here; `,` or `->`"),
        ("a -> b; c", 7, "unexpected character ';'"),
        ("a -> b, axis=x", 9, "axis takes a number, such as axis=0"),
        ("a -> b, dtype=3", 9, "dtype takes a name, such as dtype=float32"),
        ("a -> b, permute=[0, 0]", 9, "permute takes each dimension once"),
        ("a -> b, permute='x'", 9, "permute takes each dimension once"),
        ("a -> b, axis=1, axis=2", 17, "axis is said twice"),
        ("a -> b, axis=1, c", 17, "a name behind an attribute"),
        ("a -> b -> c", 8, "unexpected '->'"),
    ],
)
def test_a_statement_that_cannot_be_read(text: str, column: int, said: str) -> None:
    """The text, a mark below the place, and what may stand there."""
    with pytest.raises(StatementError) as caught:
        parse(["x -> y", text])
    assert (caught.value.number, caught.value.column) == (2, column)
    assert said in str(caught.value)
    _, shown, mark = str(caught.value).splitlines()
    assert shown == f"    {text}"
    assert mark.index("^") == 4 + column - 1


def test_an_unexpected_character_is_also_what_the_document_raises() -> None:
    """(P052)."""
    with pytest.raises(RuntimeError, match="unexpected character"):
        parse(["a -> b; c"])


def test_an_error_travels_between_processes() -> None:
    with pytest.raises(StatementError) as caught:
        parse(["a b"])
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert (str(copy), copy.column) == (str(caught.value), caught.value.column)


def test_a_name_of_a_macro_is_taken_once() -> None:
    """(P052)."""
    macros = Macros()
    macros.register("star_macro", 3)(lambda statement, _: [statement])
    with pytest.raises(ValueError, match=r"Macro 'star_macro' is already registered\."):
        macros.register("star_macro", 3)


def test_macros_come_in_the_order_of_their_priority() -> None:
    """Placeholders, arrays, stars, whatever the order they were registered in (P050, P052)."""
    assert [one.name for one in MACROS] == ["id_macro", "array_macro", "star_macro"]
    assert [one.priority for one in MACROS] == [1, 2, 3]


def test_every_layer_that_is_there() -> None:
    """Layers of two namespaces, each with its own depth; 10 comes after 2 (P048)."""
    source = {f"layers.{at}.w": of(2) for at in (0, 2, 10)} | {"mtp_block.0.w": of(2)}
    destination = {f"h.{at}.w": of(2) for at in (0, 2, 10)} | {"mtp.0.w": of(2)}
    found = mapped(
        ["layers.$LAYER_ID.w -> h.$LAYER_ID.w", "mtp_block.$LAYER_ID.w -> mtp.$LAYER_ID.w"],
        source,
        destination,
    )
    assert taken(found) == {
        "h.0.w": ("layers.0.w",),
        "h.2.w": ("layers.2.w",),
        "h.10.w": ("layers.10.w",),
        "mtp.0.w": ("mtp_block.0.w",),
    }


def test_experts_of_a_layer() -> None:
    """Two placeholders: those pairs that are there, which need not be all (P052)."""
    pairs = [(0, 0), (0, 1), (1, 3)]
    source = {f"l.{layer}.e.{expert}.w": of(2) for layer, expert in pairs}
    destination = {f"e{expert}.l{layer}": of(2) for layer, expert in pairs}
    found = mapped(["l.$LAYER_ID.e.$EXPERT_ID.w -> e$EXPERT_ID.l$LAYER_ID"], source, destination)
    assert taken(found) == {f"e{two}.l{one}": (f"l.{one}.e.{two}.w",) for one, two in pairs}


def test_layers_that_are_counted_from_another_number() -> None:
    """`_OFFSET`: one less on the right (P052)."""
    source = {"l.1.w": of(2), "l.2.w": of(2)}
    destination = {"l.0.w": of(2), "l.1.w": of(2)}
    text = "l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w"
    assert taken(mapped([text], source, destination)) == {"l.0.w": ("l.1.w",), "l.1.w": ("l.2.w",)}
    with pytest.raises(StatementError, match="number 0 has none before it"):
        mapped([text], {"l.0.w": of(2), **source}, destination)


def test_a_star_is_every_number_in_order() -> None:
    source = {f"e.{at}.w": of(1, 2) for at in (10, 9, 0)}
    found = mapped(["e.*.w -> all, axis=0"], source, {"all": of(3, 2)})
    assert taken(found)["all"] == ("e.0.w", "e.9.w", "e.10.w")


def test_an_array_is_names_with_numbers() -> None:
    found = mapped(["w -> p[0:2], axis=0"], {"w": of(4)}, {"p_0": of(2), "p_1": of(2)})
    assert [view.regions[0].box.begin for view in found.views.values()] == [(0,), (2,)]


def test_a_cut_follows_the_sizes_of_the_destination() -> None:
    """They need not be equal where the destination says how long each is."""
    found = mapped(["w -> a, b, axis=0"], {"w": of(5)}, {"a": of(1), "b": of(4)})
    assert [view.shape for view in found.views.values()] == [(1,), (4,)]


def test_the_state_of_an_optimizer_follows_its_parameter() -> None:
    """Renamed, left out and added with it; a name of its own pattern is followed, too (P049)."""
    ends = ("", ".exp_avg", ".step")
    source = {
        f"{name}{end}": of(*(() if end == ".step" else (2,))) for name in "ab" for end in ends
    }
    destination = {
        f"{name}{end}": of(*(() if end == ".step" else (2,))) for name in "cd" for end in ends
    }
    found = mapped(["a -> c", "b -> _", "_ -> d"], source, destination)
    assert taken(found) == {"c": ("a",), "c.exp_avg": ("a.exp_avg",), "c.step": ("a.step",)}
    assert found.left_alone == {"d", "d.exp_avg", "d.step"}
    other = StateNames(("state/{}/m",))
    own = compile_mapping(
        ["a -> c"], {"a": of(2), "state/a/m": of(2)}, {"c": of(2), "state/c/m": of(2)}, other
    )
    assert taken(own)["state/c/m"] == ("state/a/m",)


def test_tied_weights_take_one_state() -> None:
    """Both names get the one that is there (P032)."""
    source = {"embed": of(2), "embed.moment1_0": of(2)}
    destination = {name: of(2) for name in ("embed", "embed.moment1_0", "head", "head.moment1_0")}
    found = mapped(["embed -> embed", "embed -> head"], source, destination)
    assert taken(found)["head.moment1_0"] == ("embed.moment1_0",)


def test_a_state_that_the_source_lacks_is_named() -> None:
    """With the statement that it would follow (P032)."""
    with pytest.raises(StatementError) as caught:
        mapped(["embed -> head"], {"embed": of(2)}, {"head": of(2), "head.moment1_0": of(2)})
    assert "the source has no 'embed.moment1_0'" in str(caught.value)
    assert caught.value.column == 10


WEIGHTS = {"layer.weight": of(4, 2), "layer.bias": of(4)}


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (["layer.wieght -> x"], "the source has no 'layer.wieght'; the nearest is 'layer.weight'"),
        (["layer.weight -> layer.weigth"], "and no statement takes it; the nearest is"),
        (["h.$LAYER_ID.w -> l.$LAYER_ID.w"], "no name of the source matches"),
        (["l.$LAYER_ID.w -> l.w"], "every name here must have $LAYER_ID"),
        (["e.*.w -> x, axis=0"], "no name matches"),
        (["w[2:2] -> x, axis=0"], "from 2 to 2 there is no name"),
        (["layer.weight -> layer.bias, layer.weight"], "say along which axis, as axis=0"),
        (["layer.weight -> a, b, axis=2"], "it has no such axis"),
        (["layer.weight -> a, b, c, axis=0"], "together 3"),
        (["layer.weight, layer.bias -> x, axis=0"], "they cannot be joined along axis 0"),
        (["layer.weight, layer.bias -> a, b, axis=0"], "one side has a single name"),
        (["layer.weight -> layer.weight^T"], "`^T` stands on the left"),
        (["layer.weight -> layer.weight, permute=[0]"], "permute=[0], and its shape is (4, 2)"),
        (["layer.weight^T -> layer.weight"], "and what is made for it float32 (2, 4)"),
        (["layer.weight -> layer.weight, dtype=bfloat16"], "write dtype=float32 to convert it"),
        (["layer.weight -> _, axis=0"], "`_` stands alone on its side"),
        (["layer.weight, layer.bias -> _"], "`_` stands alone on its side"),
        (["_ -> nowhere"], "the destination has no 'nowhere'"),
        (["layer.weight -> a", "layer.bias -> a"], "statement 1 has made 'a' already"),
        (["layer.weight -> x, fused_ffn, axis=4"], "axis=4, and its shape is (4, 2)"),
        (["layer.weight -> layer.weight, fused_qkv"], "needs num_heads and num_key_value_groups"),
        (
            ["layer.weight -> x, fused_qkv, num_heads=3, num_key_value_groups=2"],
            "num_heads must be divisible by num_key_value_groups: 3 by 2 leaves 1",
        ),
        (
            ["layer.weight -> x, fused_qkv, num_heads=3, num_key_value_groups=1, axis=0"],
            "dimension 0 has 4, which is no 5 equal pieces",
        ),
        (["layer.weight -> a, b, c, fused_ffn"], "fused_ffn is between one fused name and another"),
    ],
)
def test_a_statement_that_cannot_be_carried_out(statements: list[str], said: str) -> None:
    with pytest.raises(StatementError) as caught:
        mapped(statements, WEIGHTS, WEIGHTS)
    assert said in str(caught.value)


def test_names_that_change_places_are_not_guessed() -> None:
    """`b` in the second statement could be either; whoever takes the new one loses a tensor."""
    both = {"a": of(2), "b": of(2)}
    with pytest.raises(StatementError, match="statement 1 made another one of that name"):
        mapped(["a -> b", "b -> a"], both, both)
    found = mapped(["a -> was_a", "b -> a", "was_a -> b"], both, both)
    assert taken(found) == {"a": ("b",), "b": ("a",)}


@pytest.mark.parametrize(
    ("statements", "source", "destination", "said"),
    [
        ([], {"a": of(2)}, {"a": of(2), "b": of(2)}, "nothing makes 'b' of the destination"),
        ([], {"a": of(2), "b": of(2)}, {"a": of(2)}, "nothing takes anything of the source's"),
        (
            ["a -> b, rest, axis=0"],
            {"a": of(4)},
            {"b": of(2)},
            "the destination has no 'rest'",
        ),
        ([], {"a": of(2)}, {"a": of(3)}, "'a' of the destination is float32 (3,)"),
        ([], {"a": of(2)}, {"a": of(2, dtype="int64")}, "write dtype=int64 to convert it"),
    ],
)
def test_what_is_left_over_is_refused(
    statements: list[str],
    source: dict[str, TensorInfo],
    destination: dict[str, TensorInfo],
    said: str,
) -> None:
    """Every tensor of the destination, and every element of the source (PX5)."""
    with pytest.raises(ReshardError) as caught:
        mapped(statements, source, destination)
    assert said in str(caught.value)


def test_elements_that_nobody_takes_are_counted() -> None:
    """A part that a statement cut off and left out is no loss."""
    source, destination = {"w": of(6)}, {"a": of(4)}
    statements = ["w -> w_0, w_1, w_2, axis=0", "w_0, w_1 -> a, axis=0"]
    with pytest.raises(StatementError, match="no statement takes it"):
        mapped(statements, source, destination)
    found = mapped([*statements, "w_2 -> _"], source, destination)
    assert taken(found) == {"a": ("w",)}
