"""From statements to views: what each tensor of the destination is made of.

Statements are carried out in their order, on views and not on memory. At the end every tensor of
the destination has a view, or is left as it is because a statement says so; and every element of
the source is taken by some view, or is left out because a statement says so (P032). An optimizer's
state follows its parameter where no statement names it (P049).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckpt_conformance.reference_impl.resharding import fusing
from ckpt_conformance.reference_impl.resharding.errors import ReshardError
from ckpt_conformance.reference_impl.resharding.expand import MACROS, Known
from ckpt_conformance.reference_impl.resharding.nearest import near
from ckpt_conformance.reference_impl.resharding.states import STATE_NAMES, Owner, StateNames
from ckpt_conformance.reference_impl.resharding.syntax import parse
from ckpt_conformance.reference_impl.resharding.views import View, joined
from ckpt_conformance.reference_impl.shards import Box, BoxIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpt_conformance.reference_impl.resharding.descriptors import ShardDescriptor
    from ckpt_conformance.reference_impl.resharding.syntax import Name, Statement


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
        shape: of all of it.
        dtype: as torch names it.
        cuts: in each dimension, at how many different places its shards begin; a replica is no
            shard of its own.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, shards: Sequence[ShardDescriptor]) -> TensorInfo:
        """Put together what the shards of a tensor say."""
        first = shards[0]
        begins = zip(*(shard.global_offset for shard in shards if shard.box.volume), strict=True)
        cuts = tuple(len(set(of_axis)) for of_axis in begins) or (1,) * len(first.global_shape)
        return cls(first.global_shape, first.dtype, cuts)


@dataclass(frozen=True)
class KeyMapping:
    """What a compiled mapping says.

    Attributes:
        views: what each tensor of the destination is made of.
        left_alone: tensors of the destination that get nothing: `_ -> key`.
        left_out: tensors of the source of which nothing is taken: `key -> _`.
    """

    views: dict[str, View]
    left_alone: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


def compile_mapping(
    statements: Iterable[str],
    source: Mapping[str, TensorInfo],
    destination: Mapping[str, TensorInfo],
    states: StateNames = STATE_NAMES,
) -> KeyMapping:
    """Say what each tensor of a destination is made of.

    Args:
        statements: as docs/key-mapping.md has them; none where all names stay.
        source: its tensors, by key.
        destination: the same.
        states: how the state of an optimizer is named after its parameter.

    Raises:
        StatementError: a statement that cannot be read or carried out.
        ReshardError: a tensor of the destination that nothing makes, or one of the source that
            nothing takes.
    """
    compiler = _Compiler(source, destination, states)
    for statement in parse(statements):
        for plain in MACROS.expand(statement, compiler.known):
            compiler.carry_out(plain)
    return compiler.finish()


@dataclass
class _Compiler:
    """Carries statements out, one after another.

    Attributes:
        source: tensors that are there.
        destination: tensors that are wanted.
        states: names of an optimizer's state.
        made: views by the names that statements gave them.
        by: the statement that made each.
        dropped: what was left out: views, and the keys that were named whole.
        alone: tensors of the destination that are left as they are.
    """

    source: Mapping[str, TensorInfo]
    destination: Mapping[str, TensorInfo]
    states: StateNames
    made: dict[str, View] = field(default_factory=dict)
    by: dict[str, tuple[Statement, Name]] = field(default_factory=dict)
    dropped: list[View] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    @property
    def known(self) -> Known:
        """The names that the next statement may mean."""
        return Known({**self.source, **self.made}.keys(), self.destination.keys())

    def carry_out(self, statement: Statement) -> None:
        """Carry out a plain statement."""
        nothing = [name for name in (*statement.left, *statement.right) if name.is_nothing]
        if nothing:
            self._leave(statement, nothing[0])
            return
        for name, view in zip(statement.right, self._results(statement), strict=True):
            self._make(statement, name, view)

    def _leave(self, statement: Statement, nothing: Name) -> None:
        """`key -> _` leaves out, `_ -> key` leaves alone."""
        if len(statement.left) != 1 or len(statement.right) != 1 or statement.attributes.is_given:
            raise statement.error(nothing, "`_` stands alone on its side, without attributes")
        left, right = statement.left[0], statement.right[0]
        if left.is_nothing:
            if right.text not in self.destination:
                near_it = near(right.text, self.destination)
                raise statement.error(right, f"the destination has no {right.text!r}{near_it}")
            self.alone.add(right.text)
            return
        self.dropped.append(self._view(statement, left))
        self.left_out.add(left.text)

    def _results(self, statement: Statement) -> list[View]:
        """The views that a statement makes, one for each name on its right."""
        views = [self._view(statement, name) for name in statement.left]
        if statement.attributes.fused:
            tensors = fusing.Tensors(self._infos(statement.left), self._wanted(statement.right))
            return fusing.results(statement, views, tensors)
        if len(views) > 1 and len(statement.right) > 1:
            raise statement.error(
                statement.right[1], "one side has a single name, unless the statement is fused"
            )
        if len(views) > 1:
            return [_join(statement, views)]
        if len(statement.right) > 1:
            return self._split(statement, views[0])
        return [_changed(statement, views[0])]

    def _view(self, statement: Statement, name: Name) -> View:
        """What a name on the left stands for.

        Raises:
            StatementError: nothing, or two things.
        """
        view = self.made.get(name.text)
        if view is not None and name.text in self.source and not self._is_its_own(name.text):
            raise statement.error(
                name,
                f"{name.text!r} is a tensor of the source, and statement "
                f"{self.by[name.text][0].number} made another one of that name: give that one a "
                f"name of its own, such as 'new.{name.text}', and it the right name at the end",
            )
        if view is None and name.text in self.source:
            info = self.source[name.text]
            view = View.of(name.text, info.shape, info.dtype)
        if view is None:
            near_it = near(name.text, self.known.left)
            raise statement.error(name, f"the source has no {name.text!r}{near_it}")
        self.used.add(name.text)
        return view.permuted(range(len(view.shape))[::-1]) if name.transposed else view

    def _is_its_own(self, name: str) -> bool:
        """Whether what was made under a name is made of the tensor of that name."""
        return name in self.made[name].keys

    def _make(self, statement: Statement, name: Name, view: View) -> None:
        if name.transposed:
            raise statement.error(name, "`^T` stands on the left: turn what is taken")
        if name.text in self.by and not self._is_its_own(name.text):
            earlier = self.by[name.text][0].number
            raise statement.error(name, f"statement {earlier} has made {name.text!r} already")
        self.made[name.text], self.by[name.text] = view, (statement, name)

    def _infos(self, names: Sequence[Name]) -> list[TensorInfo | None]:
        """What is known of source tensors; a state is cut as its parameter is (P051)."""
        return [self._cut_like_model(self.source, name.text) for name in names]

    def _wanted(self, names: Sequence[Name]) -> list[TensorInfo | None]:
        return [self._cut_like_model(self.destination, name.text) for name in names]

    def _cut_like_model(self, tensors: Mapping[str, TensorInfo], key: str) -> TensorInfo | None:
        info, owner = tensors.get(key), self.states.owner(key, tensors)
        if info is None or owner is None or tensors[owner.parameter].shape != info.shape:
            return info
        return replace(info, cuts=tensors[owner.parameter].cuts)

    def _split(self, statement: Statement, view: View) -> list[View]:
        """Cut a view into the names on the right: as long as the destination has them, or equal."""
        axis = _axis(statement, view)
        wanted = [self.destination.get(name.text) for name in statement.right]
        extent, parts = view.shape[axis], len(wanted)
        sizes = [one.shape[axis] for one in wanted if one and len(one.shape) == len(view.shape)]
        if len(sizes) < parts:
            sizes = [extent // parts] * parts
        if sum(sizes) != extent:
            raise statement.error(
                statement.left[0],
                f"dimension {axis} has {extent} and the parts on the right {sizes}, together "
                f"{sum(sizes)}",
            )
        return view.split(axis, sizes)

    def finish(self) -> KeyMapping:
        """Give each tensor of the destination its view, and see that nothing is left over."""
        self._check_used()
        views = {
            key: self._final(key, info)
            for key, info in self.destination.items()
            if not self._is_left_alone(key)
        }
        for key, view in views.items():
            self._check_fit(key, view)
        self._check_taken(views)
        alone = frozenset(self.destination.keys() - views.keys())
        return KeyMapping(views, alone, frozenset(self.left_out))

    def _is_left_alone(self, key: str) -> bool:
        """Whether a statement says so of it, or of its parameter and none names it."""
        owner = self.states.owner(key, self.destination)
        follows = owner is not None and owner.parameter in self.alone and key not in self.made
        return key in self.alone or follows

    def _final(self, key: str, info: TensorInfo) -> View:
        """What a tensor of the destination is made of."""
        if key in self.made:
            return self.made[key]
        owner = self.states.owner(key, self.destination)
        if owner is not None and owner.parameter in self.made:
            return self._following(key, owner)
        if key not in self.source:
            raise ReshardError(
                f"nothing makes {key!r} of the destination: the source has no such tensor"
                f"{near(key, self.source)}. Write a statement for it, or `_ -> {key}` to leave it "
                f"as it is"
            )
        given = self.source[key]
        fusing.refuse_cut(key, given, self._cut_like_model(self.destination, key) or info)
        return View.of(key, given.shape, given.dtype)

    def _following(self, key: str, owner: Owner) -> View:
        """What its parameter is made of, each tensor replaced by the state that goes with it."""
        made = self.made[owner.parameter]
        statement, name = self.by[owner.parameter]
        states = {}
        for parameter in made.keys:
            state = owner.of(parameter)
            if state not in self.source:
                raise statement.error(
                    name,
                    f"the source has no {state!r}, which {key!r} of the destination follows here"
                    f"{near(state, self.source)}",
                )
            states[parameter] = state
        shapes = {
            self.source[parameter].shape == self.source[state].shape
            for parameter, state in states.items()
        }
        if shapes == {True}:
            return self._state_view(made, states)
        first, *others = states.values()
        info = self.source[first]
        return replace(View.of(first, info.shape, info.dtype), equal=tuple(others))

    def _state_view(self, made: View, states: Mapping[str, str]) -> View:
        """The view of a state that has the shape of its parameter; it is not converted (P025)."""
        regions = tuple(one._replace(key=states[one.key], casts=()) for one in made.regions)
        dtype = self.source[next(iter(states.values()))].dtype
        return replace(made, regions=regions, dtype=dtype)

    def _check_fit(self, key: str, view: View) -> None:
        info = self.destination[key]
        if (view.shape, view.dtype) == (info.shape, info.dtype):
            return
        cure = "" if view.dtype == info.dtype else f"; write dtype={info.dtype} to convert it"
        reason = (
            f"{key!r} of the destination is {info.dtype} {info.shape}, and what is made for it "
            f"{view.dtype} {view.shape}{cure}"
        )
        if key in self.by:
            statement, name = self.by[key]
            raise statement.error(name, reason)
        raise ReshardError(reason)

    def _check_used(self) -> None:
        """Refuse a name that a statement made and that leads nowhere: it may be a slip."""
        for name, (statement, at) in self.by.items():
            if name not in self.destination and name not in self.used:
                near_it = near(name, self.destination)
                raise statement.error(
                    at, f"the destination has no {name!r}, and no statement takes it{near_it}"
                )

    def _check_taken(self, views: Mapping[str, View]) -> None:
        """Refuse elements of the source that no view takes and no statement leaves out."""
        taken: dict[str, list[Box]] = defaultdict(list)
        for view in (*views.values(), *self.dropped):
            for region in view.regions:
                taken[region.key].append(region.box)
            for key in view.equal:
                taken[key].append(Box((0,) * len(self.source[key].shape), self.source[key].shape))
        for key, info in self.source.items():
            owner = self.states.owner(key, self.source)
            if owner is not None and owner.parameter in self.left_out:
                continue
            if missing := _not_taken(info, taken[key]):
                raise ReshardError(
                    f"nothing takes {missing} of the source's tensor {key!r} {info.shape}"
                    f"{near(key, self.destination)}. Write a statement for it, or `{key} -> _` to "
                    f"leave it out"
                )


def _not_taken(info: TensorInfo, boxes: Sequence[Box]) -> str:
    """How much of a tensor no box holds, in words; nothing if each element is in one or more."""
    whole = Box((0,) * len(info.shape), info.shape)
    if not whole.volume or whole in boxes:
        return ""
    if not boxes:
        return "anything"
    volume = _union(boxes)
    return f"{whole.volume - volume} of {whole.volume} elements" if volume < whole.volume else ""


def _union(boxes: Sequence[Box]) -> int:
    """Number of elements in at least one of the boxes."""
    disjoint: list[Box] = []
    pending = list(dict.fromkeys(boxes))
    index = BoxIndex([(box, None) for box in pending])
    if all(sum(1 for _ in index.common(box)) == 1 for box in pending):
        return sum(box.volume for box in pending)
    for box in pending:
        rest = [box]
        for other in disjoint:
            rest = [part for one in rest for part in one.without(other)]
        disjoint += rest
    return sum(box.volume for box in disjoint)


def _axis(statement: Statement, view: View) -> int:
    """The dimension along which names are joined or cut."""
    axis = statement.attributes.axis
    if axis is None:
        raise statement.error(statement.left[0], "several names: say along which axis, as axis=0")
    if axis >= len(view.shape):
        raise statement.error(
            statement.left[0], f"axis={axis}, and its shape is {view.shape}: it has no such axis"
        )
    return axis


def _join(statement: Statement, views: Sequence[View]) -> View:
    """Put several views together.

    Raises:
        StatementError: they differ in dtype, or in a dimension that is not the one they join in.
    """
    axis = _axis(statement, views[0])
    first = views[0]
    for name, view in zip(statement.left, views, strict=True):
        one, other = list(first.shape), list(view.shape)
        if len(one) == len(other):
            one[axis] = other[axis] = 0
        if (one, first.dtype) != (other, view.dtype):
            raise statement.error(
                name,
                f"{name.text!r} is {view.dtype} {view.shape} and the first one {first.dtype} "
                f"{first.shape}: they cannot be joined along axis {axis}",
            )
    return _changed(statement, joined(views, axis))


def _changed(statement: Statement, view: View) -> View:
    """Turn and convert a view as the attributes say."""
    attributes = statement.attributes
    if attributes.permute is not None:
        order = attributes.permute or tuple(range(len(view.shape)))[::-1]
        if len(order) != len(view.shape):
            raise statement.error(
                statement.left[0], f"permute={list(order)}, and its shape is {view.shape}"
            )
        view = view.permuted(order)
    return view.cast(attributes.dtype) if attributes.dtype else view
