"""How Hypothesis draws for checks: the same on each machine, whatever profile is loaded there.

Hypothesis loads another profile where it takes the machine for one of a CI service. What a check
draws is said by the seed of the session alone, so every setting is given here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis import Phase, settings


def quiet(examples: int, phases: Sequence[Phase] = (), steps: int = 50) -> settings:
    """Return settings for so many examples; no phases for generating and shrinking.

    Args:
        examples: how many are drawn at most.
        phases: what Hypothesis does with them.
        steps: rules of a state machine, at most.

    """
    from hypothesis import HealthCheck, Phase, Verbosity, settings

    return settings(
        max_examples=examples,
        phases=phases or (Phase.generate, Phase.shrink),
        stateful_step_count=steps,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
        verbosity=Verbosity.quiet,
    )
