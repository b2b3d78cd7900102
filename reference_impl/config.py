"""The configuration of a job beside that of a checkpoint: what is new, and what may not differ.

A manifest keeps the configuration that a checkpoint was saved with. A feature that is younger than
the checkpoint is off in it (M037). Most differences are reported and nothing more; another number
of experts is refused (M036): what was counted for one router means nothing to another, and would
be loaded without a sound where shapes happen to fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckpt_conformance.reference_impl.errors import ExpertsChanged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpt_conformance.reference_impl.manifest import Json

CONFIG_DEFAULTS: Mapping[str, bool] = {
    "engram_enabled": False,
    "mamba_enabled": False,
    "dsa_enabled": False,
}
"""Features that are younger than the oldest checkpoints; off is what those were trained with."""

EXPERTS = frozenset({"n_experts", "num_experts", "num_local_experts", "n_routed_experts"})
"""Names of the number of experts, anywhere in a configuration."""


def patch_missing_config_keys(config: Mapping[str, Json]) -> dict[str, Json]:
    """A copy of an old checkpoint's config with the newer keys, set to off (M037).

    It cannot invent what is not there: another sharding is refused elsewhere (M034).
    """
    return {**CONFIG_DEFAULTS, **config}


def added_keys(config: Mapping[str, Json]) -> dict[str, Json]:
    """What `patch_missing_config_keys` adds to a config; nothing to one that says nothing."""
    if not config:
        return {}
    return {key: off for key, off in CONFIG_DEFAULTS.items() if key not in config}


def check_experts(here: Mapping[str, Json], there: Mapping[str, Json]) -> None:
    """Check that a checkpoint was saved with the job's number of experts (M036).

    Args:
        here: the job's configuration; a number that it does not have is not compared.
        there: that of the checkpoint.

    Raises:
        ExpertsChanged: it was saved with another one.
    """
    saved = dict(numbers_of_experts(there))
    for path, now in numbers_of_experts(here):
        then = saved.get(path, now)
        if then != now:
            raise ExpertsChanged(
                f"config.{path} is {now} here and {then} in the checkpoint: what the router has "
                f"learned and counted is of {then} experts. Start from its other weights with a "
                f"router that begins anew, or set {path} to {then}",
            )


def numbers_of_experts(config: Mapping[str, Json], path: str = "") -> Iterator[tuple[str, Json]]:
    """Each number of experts in a configuration, with its path."""
    for key, value in config.items():
        if isinstance(value, dict):
            inner = cast("dict[str, Json]", value)
            yield from numbers_of_experts(inner, f"{path}{key}.")
        elif key in EXPERTS:
            yield f"{path}{key}", value
