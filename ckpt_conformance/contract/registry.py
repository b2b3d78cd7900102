"""Adapters by name: bundled ones, `module:attr`, entry points, and mutants.

Nothing is imported before it is asked for; an adapter imports its third-party manager itself.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Self

from msgspec import Struct

from ckpt_conformance.contract import EVERYTHING, POLICIES, Capability, Feature
from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.requests import nearest

GROUP = "ckpt_conformance.adapters"
PACKAGE = __name__.partition(".")[0]
MUTANT = "mutant:"
GENERATED = "generated:"  # a mutant that nobody wrote: `generated:NAME@BASE`

# name -> (module below ckpt_conformance.adapters, attribute): an adapter, or what makes one.
BUNDLED: dict[str, tuple[str, str]] = {
    "reference": ("reference", "per_rank"),
    "reference-dcp": ("reference", "dcp_directory"),
    "reference-trainer": ("reference_trainer", "make"),
    "torch-save-inplace": ("torch_save", "inplace"),
    "torch-save-atomic-fixed-name": ("torch_save", "atomic_fixed_name"),
    "torch-save-atomic-per-step": ("torch_save", "atomic_per_step"),
    "dcp-per-step": ("dcp", "per_step"),
    "dcp-overwrite": ("dcp", "overwrite"),
    "dcp-threads": ("dcp", "threads"),
    "dcp-async": ("dcp", "background"),
    "torch-save-mirrored": ("mirrored", "naive"),
    "torch-save-mirrored-join": ("mirrored", "join"),
    "dcp-mirrored": ("mirrored", "dcp"),
    "safetensors-per-step": ("safetensors_file", "per_step"),
    "accelerate": ("accelerate_state", "make"),
    "lightning": ("lightning_checkpoint", "make"),
}
EXTRAS = frozenset(
    {"accelerate", "lightning"}
)  # each needs an extra of its own name, which may not be installed


class AdapterError(ValueError):
    """An adapter's name or object is not usable; the message names it and says what to do."""


class Refusal(Struct, frozen=True):
    """Why an adapter can't be used, as the process that tried to make it says it."""

    message: str
    type: str = ""  # the class of the exception that was raised; empty if none was

    @classmethod
    def of_error(cls, error: BaseException) -> Self:
        """Describe an exception that making the adapter raised."""
        return cls(str(error), type(error).__name__)

    def __str__(self) -> str:
        """Write the exception as a traceback ends with it."""
        return f"{self.type}: {self.message}" if self.type else self.message

    def about(self, name: str) -> str:
        """Write the sentence about the adapter `name`; our own messages name it already."""
        if self.type in {"", AdapterError.__name__}:
            return self.message
        return f"adapter {name!r} cannot be made: {self}"


@dataclass(frozen=True)
class AdapterInfo:
    """What a certificate says about an adapter; plain values only."""

    name: str
    version: str
    shape: str
    capabilities: list[str]
    holds: list[str]
    library: str
    recipe: str
    owner: str
    notes: str
    title: str = ""  # what the adapter calls itself
    isolation: str = "fork"
    promises: dict[str, str] = field(default_factory=dict[str, str])
    resharding: dict[str, str] = field(default_factory=dict[str, str])
    saves_over: bool = True
    min_keep: int = 1
    max_keep: int | None = None
    cannot_hold: dict[str, str] = field(default_factory=dict[str, str])
    skips: bool = False
    prepares: bool = False

    def to_json(self) -> dict[str, str | list[str] | bool | int | dict[str, str] | None]:
        """Turn it into what a result says of its adapter; lists are sorted."""
        return {
            "name": self.name,
            "title": self.title,
            "version": self.version,
            "shape": self.shape,
            "capabilities": sorted(self.capabilities),
            "holds": sorted(self.holds),
            "library": self.library,
            "recipe": self.recipe,
            "owner": self.owner,
            "notes": self.notes,
            "saves_over": self.saves_over,
            "min_keep": self.min_keep,
            "max_keep": self.max_keep,
            "cannot_hold": dict(sorted(self.cannot_hold.items())),
            "skips": self.skips,
        }


def get(name: str) -> Any:  # noqa: ANN401  an Adapter; checked by `_check`
    """Import and return the adapter of a name.

    Raises AdapterError for an unknown name, a module that does not import, a missing attribute, or
    an object that is no adapter.
    """
    if name.startswith(MUTANT):
        return _check(name, _mutants().adapter(name.removeprefix(MUTANT)))
    if name.startswith(GENERATED):
        return _check(name, _generated().adapter(name.removeprefix(GENERATED)))
    module, _, attribute = place_of(name).partition(":")
    return _check(name, _load(name, module, attribute))


def place_of(name: str) -> str:
    """Name the place of an adapter as `module:attribute`, without importing it.

    Raises AdapterError for an unknown name.
    """
    if name.startswith(MUTANT):
        return str(_mutants().place_of(name.removeprefix(MUTANT)))
    if name.startswith(GENERATED):
        return str(_generated().place_of(name.removeprefix(GENERATED)))
    if name in BUNDLED:
        module, attribute = BUNDLED[name]
        return f"{PACKAGE}.adapters.{module}:{attribute}"
    if ":" in name:
        return name
    if name in (plugins := entry_points()):
        return plugins[name]
    raise _unknown(name)


def _mutants() -> Any:  # noqa: ANN401  a package that stands above this one
    return importlib.import_module(f"{PACKAGE}.mutants")


def _generated() -> Any:  # noqa: ANN401  the same
    return importlib.import_module(f"{PACKAGE}.mutants.generated")


def check_name(name: str) -> None:
    """Raise AdapterError for a plain name that is not known; imports nothing."""
    if name.startswith((MUTANT, GENERATED)):
        return  # its own package says which there are
    module, colon, attribute = name.partition(":")
    if colon and not all(map(_is_dotted, (module, attribute))):
        path = module.removesuffix(".py").strip("./").replace("/", ".")
        near = f"{path or 'my_package.module'}:{attribute or 'make'}"
        raise AdapterError(
            f"adapter {name!r} is not of the form module:attribute; "
            f"a module is named as it is imported, such as {near!r}"
        )
    if not colon and name not in known():
        raise _unknown(name)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _unknown(name: str) -> AdapterError:
    module, _, attribute = name.rpartition(".")
    if module and _is_dotted(name):
        forms = [f"{module}:{attribute}"]
        if attribute != "make":  # it may be a module that was named alone
            forms.insert(0, f"{name}:make")
        hint = f"did you mean {' or '.join(map(repr, forms))}? "
    else:
        hint = nearest(name, known()) or f"known: {', '.join(known())}. "
    own = "Your own manager is named as my_package.module:attribute."
    return AdapterError(f"unknown adapter {name!r}: {hint}{own}")


def known() -> list[str]:
    """Name every adapter that can be asked for by a plain name, bundled ones first."""
    return list(dict.fromkeys([*BUNDLED, *entry_points()]))


def entry_points() -> dict[str, str]:
    """List what installed packages register: name -> "module:attribute".

    A bundled name stays the bundled adapter; of two packages with one name the first found counts.
    """
    registered: dict[str, str] = {}
    for entry in metadata.entry_points(group=GROUP):
        if entry.name not in BUNDLED:
            registered.setdefault(entry.name, f"{entry.module}:{entry.attr}")
    return registered


def _load(name: str, module: str, attribute: str) -> Any:  # noqa: ANN401
    """Import a module and return its attribute, which may be dotted."""
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        hint = _why_not(name, module, error)
        msg = f"adapter {name!r}: module {module!r} does not import ({error}); {hint}"
        raise AdapterError(msg) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [key for key in dir(value) if not key.startswith("_")]
            near = nearest(part, public) or f"it has {', '.join(public[:5])}"
            raise AdapterError(f"adapter {name!r}: module {module!r} has no {attribute!r}; {near}")
        value = getattr(value, part)
    return value


def _why_not(name: str, module: str, error: ImportError) -> str:
    """Write what to do about a module that does not import."""
    missing = error.name or ""
    if name in BUNDLED and f"{missing}.".startswith("ckpt_conformance."):
        return "this installation is not whole: pip install --force-reinstall ckpt-conformance"
    if name in BUNDLED:
        extra = name if name in EXTRAS else "reference"
        return f"install it with: pip install 'ckpt-conformance[{extra}]'"
    if not f"{module}.".startswith(f"{missing}."):
        return f"{missing or 'what it imports'} is missing where the suite runs: install it there"
    hint = _nearest_module(missing)
    return f"{hint}is it installed here, or does it lie in the working directory?"


def _nearest_module(missing: str) -> str:
    """Write a hint with modules named almost so, beside where the missing one was looked for."""
    package, dot, last = missing.rpartition(".")
    paths = sys.modules[package].__path__ if package in sys.modules else None
    if dot and paths is None:
        return ""
    siblings = {module.name for module in pkgutil.iter_modules(paths)}
    return nearest(last, sorted(siblings - sys.stdlib_module_names), 0.75)


def _check(name: str, named: Any) -> Any:  # noqa: ANN401
    """Return the adapter, made if a factory was named; AdapterError for a field that is wrong."""
    adapter = _made(name, named)
    for needed in ("name", "version", "shape", "capabilities", "holds", "isolation", "open"):
        if not hasattr(adapter, needed):
            lacks = f"{type(adapter).__name__} lacks {needed!r}"
            msg = f"adapter {name!r}: {lacks}; see docs/adapter-guide.md"
            raise AdapterError(msg)
    for field_name, values, allowed in _fields(adapter):
        for value in values:
            if value not in allowed:
                choice = ", ".join(map(repr, allowed))
                msg = f"adapter {name!r}: {field_name} has {value!r}; it may be {choice}"
                raise AdapterError(msg)
    _check_limits(name, adapter)
    return adapter


def _check_limits(name: str, adapter: Any) -> None:  # noqa: ANN401
    """Raise AdapterError for a limit of another type, or that nothing can keep to or quotes."""
    over, keep = getattr(adapter, "saves_over", True), getattr(adapter, "min_keep", 1)
    for given, value in (("saves_over", over), ("skips", getattr(adapter, "skips", False))):
        if not isinstance(value, bool):
            raise AdapterError(f"adapter {name!r}: {given} is {value!r}; it may be True or False")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        msg = f"adapter {name!r}: min_keep is {keep!r}; it is a number of checkpoints, 1 or more"
        raise AdapterError(msg)
    most = getattr(adapter, "max_keep", None)
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < keep):
        what = f"max_keep is {most!r}, min_keep is {keep}"
        msg = f"adapter {name!r}: {what}; it is a number of checkpoints, no fewer, or None"
        raise AdapterError(msg)
    if most == 1 and Capability.EXPLICIT_STEP in adapter.capabilities:
        msg = f"adapter {name!r}: max_keep is 1, so there is no step to choose: drop EXPLICIT_STEP"
        raise AdapterError(msg)
    for feature, why in _cannot_hold(adapter).items():
        if not str(why).strip():
            what = f"cannot_hold[{str(feature)!r}] is {why!r}"
            msg = f"adapter {name!r}: {what}; it quotes the documentation that says so"
            raise AdapterError(msg)


def _made(name: str, named: Any) -> Any:  # noqa: ANN401
    """Return what was named, or what it makes where it is a class or a factory."""
    try:
        return named() if isinstance(named, type) or not hasattr(named, "open") else named
    except ImportError as error:
        msg = f"adapter {name!r} needs a package that is not installed: {error}"
        raise AdapterError(msg) from error
    except TypeError as error:
        called = getattr(named, "__qualname__", repr(named))
        if error.__traceback__ and error.__traceback__.tb_next:
            msg = f"adapter {name!r}: {called}() raised TypeError: {error}"
        else:
            what = f"{called} is neither an adapter nor a factory without arguments"
            msg = f"adapter {name!r}: {what} ({error})"
        raise AdapterError(msg) from error


def _fields(adapter: Any) -> list[tuple[str, list[str], list[str]]]:  # noqa: ANN401
    """Return the fields with known values: name, values of the adapter, values that are allowed."""
    policies = {f"{part}={way}" for part, ways in POLICIES.items() for way in ways}
    resharding = getattr(adapter, "resharding", {})
    return [
        ("resharding", [f"{part}={way}" for part, way in resharding.items()], sorted(policies)),
        ("shape", [adapter.shape], ["manager", "trainer"]),
        ("isolation", [adapter.isolation], ["fork", "spawn", "exec"]),
        ("capabilities", sorted(map(str, adapter.capabilities)), sorted(map(str, Capability))),
        ("holds", sorted(adapter.holds), sorted({*EVERYTHING, "gradients"})),
        ("cannot_hold", sorted(map(str, _cannot_hold(adapter))), sorted(map(str, Feature))),
        ("promises", sorted(getattr(adapter, "promises", {})), sorted(load_catalogue().invariants)),
    ]


def _cannot_hold(adapter: Any) -> dict[str, str]:  # noqa: ANN401
    return dict(getattr(adapter, "cannot_hold", {}))


def describe(name: str) -> AdapterInfo:
    """Return an adapter's plain facts; raises AdapterError as `get` does."""
    adapter = get(name)
    recipe = str(getattr(adapter, "recipe", ""))
    return AdapterInfo(
        name=name,
        version=str(adapter.version),
        shape=adapter.shape,
        capabilities=sorted(str(capability) for capability in adapter.capabilities),
        holds=sorted(adapter.holds),
        library=str(getattr(adapter, "library", "")),
        recipe=recipe,
        owner=str(getattr(adapter, "owner", "")) or ("recipe" if recipe else "adapter"),
        notes=str(getattr(adapter, "notes", "")),
        title=str(adapter.name),
        isolation=adapter.isolation,
        promises=dict(getattr(adapter, "promises", {})),
        resharding=dict(getattr(adapter, "resharding", {})),
        saves_over=getattr(adapter, "saves_over", True),
        min_keep=getattr(adapter, "min_keep", 1),
        max_keep=getattr(adapter, "max_keep", None),
        skips=getattr(adapter, "skips", False),
        prepares=bool(getattr(adapter, "prepares", False)),
        cannot_hold={str(what): why for what, why in _cannot_hold(adapter).items()},
    )
