"""Stateful: whatever was done to a manager before, it does not leave the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hypothesis import Phase, seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt_conformance.contract.catalogue import load_catalogue
from ckpt_conformance.contract.verdicts import NotApplicable, Unknown, Violation
from ckpt_conformance.fault_injectors import injected_save, points
from ckpt_conformance.subject import controls, drawing
from ckpt_conformance.subject.checks import check, id_of
from ckpt_conformance.suites import covering, sequences
from ckpt_conformance.suites.controls import test_bit_exact_resume as bit_exact
from ckpt_conformance.suites.controls import test_rng_scheduler as rng_scheduler
from ckpt_conformance.suites.controls import test_smoke as smoke
from ckpt_conformance.suites.covering import Move
from ckpt_conformance.suites.sequences import (
    SEEDS,
    STEPS,
    BeginAnew,
    DamageFile,
    DieInSave,
    Execution,
    KeepLast,
    LoadStep,
    Restart,
    SaveStep,
    TrainOn,
    World,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from ckpt_conformance.harness.messages import Fault
    from ckpt_conformance.subject.controls import Check
    from ckpt_conformance.subject.subject import Subject
    from ckpt_conformance.suites.sequences import Rule

    Vocabulary = frozenset[type[Rule]]

STEERING = (
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "loader",
    "rng",
)  # what makes the next step
DRAWN, RULES = 40, 24  # scripts at the full budget, rules in each
DEATHS = 3  # kills inside a save at the quick budget
SHORTEN = 24  # runs that a script may cost while it is made shorter
SAVE, LOAD, RESTART, BEGIN = SaveStep(), LoadStep(), Restart(), BeginAnew()
PLAIN: list[Rule] = [
    SAVE,
    SAVE,
    SAVE,
    LOAD,
    BEGIN,
    LOAD,
    LOAD,
    SAVE,
    BEGIN,
    LOAD,
]  # no faults; over an epoch
KEEP = KeepLast(2)
PICK = st.integers(0, 5)
DAMAGES = [
    DamageFile(file, fault)
    for fault in ("bit-flip", "missing-file", "truncation-half")
    for file in (0, -1)
]


class Draw(RuleBasedStateMachine):
    """Draws scripts: train, save, load, restart, rotate, delete or damage a file, die in a save.

    What ends a process is followed by a load, as in a job that is started again.
    """

    vocabulary: Vocabulary = frozenset()
    damages: Sequence[DamageFile] = ()
    scripts: list[list[Rule]] = []  # noqa: RUF012  one per subclass, see `draw`

    def __init__(self) -> None:
        """Begin an empty script."""
        super().__init__()
        self.script: list[Rule] = []

    def may(self, kind: type[Rule], most: int = 2) -> bool:
        """Return whether a kind of rule may be drawn here, and was not drawn too often."""
        drawn = sum(isinstance(rule, kind) for rule in self.script)
        return kind in self.vocabulary and drawn < most

    @initialize()
    def first(self) -> None:
        """Every script begins with two saves."""
        self.script += [SAVE, SAVE]

    @rule(count=st.integers(1, 2))
    def save(self, count: int) -> None:
        """Train and save."""
        self.script += [SAVE] * count

    @precondition(lambda self: not isinstance(self.script[-1], TrainOn))
    @rule()
    def train(self) -> None:
        """Train on without a save."""
        self.script.append(TrainOn())

    @precondition(lambda self: not isinstance(self.script[-1], LoadStep))
    @rule()
    def load(self) -> None:
        """Load the latest."""
        self.script.append(LOAD)

    @precondition(lambda self: LoadStep in self.vocabulary)
    @rule(pick=PICK)
    def load_step(self, pick: int) -> None:
        """Load a step by its number."""
        self.script.append(LoadStep(pick))

    @rule()
    def restart(self) -> None:
        """End the process and resume."""
        self.script += [RESTART, LOAD, SAVE]

    @precondition(lambda self: self.may(BeginAnew, 1))
    @rule()
    def begin(self) -> None:
        """Begin another run from scratch in the same directory."""
        self.script += [BEGIN, SAVE]

    @precondition(lambda self: self.may(KeepLast))
    @rule(number=st.integers(1, 3))
    def rotate(self, number: int) -> None:
        """Let rotation keep so many from now on."""
        self.script += [KeepLast(number), LOAD, SAVE, SAVE]

    @precondition(lambda self: self.may(DamageFile))
    @rule(pick=PICK, which=PICK)
    def damage(self, pick: int, which: int) -> None:
        """Damage or delete a file of a step."""
        damage = self.damages[which % len(self.damages)]
        self.script += [replace(damage, pick=pick), LOAD, SAVE]

    @precondition(lambda self: self.may(DieInSave))
    @rule(pick=PICK)
    def die(self, pick: int) -> None:
        """Die inside a save."""
        self.script += [DieInSave(pick), LOAD, SAVE]

    def teardown(self) -> None:
        """Keep the script."""
        self.scripts.append(self.script)


def draw(
    vocabulary: Vocabulary, damages: Sequence[DamageFile], subject: Subject
) -> list[list[Rule]]:
    """Draw scripts by the seed; of many, choose those with the most kinds of rule."""
    given: dict[str, object] = {"vocabulary": vocabulary, "damages": damages, "scripts": []}
    machine: Any = type("Scripts", (Draw,), given)
    quiet = drawing.quiet(4 * DRAWN, [Phase.generate], RULES)
    run_state_machine_as_test(seed(subject.seed)(machine), settings=quiet)
    scripts: list[list[Rule]] = machine.scripts
    return sorted(scripts, key=lambda script: -len(set(script)))[:DRAWN]


def moves(vocabulary: Vocabulary, damages: Sequence[DamageFile]) -> list[Move]:
    """List the moves that hold by themselves; what ends a process is followed by a load."""

    def pick(rng: random.Random) -> int:
        return rng.randrange(6)

    def damage(rng: random.Random) -> list[Rule]:
        return [replace(rng.choice(damages), pick=pick(rng)), LOAD, SAVE]

    every: dict[type[Rule], Move] = {
        LoadStep: Move("load a step", lambda rng: [LoadStep(pick(rng))]),
        BeginAnew: Move("begin anew", lambda _: [BEGIN, SAVE], most=1),
        KeepLast: Move("rotate", lambda rng: [KeepLast(rng.randint(1, 3)), LOAD, SAVE, SAVE], 2),
        DamageFile: Move("damage", damage, most=2),
        DieInSave: Move("die", lambda rng: [DieInSave(pick(rng)), LOAD, SAVE], most=2),
    }
    always = [
        Move("save", lambda _: [SAVE]),
        Move("train", lambda _: [TrainOn()]),
        Move("load", lambda _: [LOAD]),
        Move("restart", lambda _: [RESTART, LOAD, SAVE]),
    ]
    return [*always, *(move for kind, move in every.items() if kind in vocabulary)]


def world_of(subject: Subject) -> World:
    """Return what scripts are judged by: two unbroken runs, which this manager resumes."""
    missing = [part for part in STEERING if part not in subject.holds]
    if missing:
        raise NotApplicable(
            f"the manager does not save {', '.join(missing)}: runs cannot be resumed"
        )
    runs = {name: subject.golden(STEPS, seed=number) for name, number in SEEDS.items()}
    states = {name: {step: golden.at[step] for step in STEPS} for name, golden in runs.items()}
    world = World(states, sequences.files_of_steps(runs["first"]), deaths(subject))
    violation = fails(subject, world, PLAIN)
    if violation:
        reason = f"a plain resume leaves the model: {violation}"
        raise controls.blame(subject, reason, *plain_checks())
    return world


def plain_checks() -> list[Check]:
    """List the checks of a resume without faults: what fails there fails here, too.

    A SHOULD is about more than a plain job.
    """
    named = {**vars(smoke), **vars(bit_exact), **vars(rng_scheduler)}
    found = [named[name] for name in named if name.startswith("test_") and callable(named[name])]
    known = load_catalogue().invariants
    return [check for check in found if known[id_of(check)].basis != "practice"]


def deaths(subject: Subject) -> list[Fault]:
    """Return kills inside a save."""
    try:
        every = injected_save.points_of(subject, injected_save.SaveKind.NEW)
    except Unknown:
        return []
    quick = DEATHS if subject.budget == "quick" else len(every)
    return [point.spec("kill") for point in points.choose(every, subject.rng, quick)]


def fails(subject: Subject, world: World, script: list[Rule]) -> Violation | None:
    """Run a script; give what it violates."""
    try:
        Execution(subject, world).execute(script)
    except Violation as error:
        return error
    return None


@dataclass(frozen=True)
class Rules:
    """What scripts are made of: the world that judges them, the kinds of rule, the damages."""

    world: World
    vocabulary: Vocabulary
    damages: Sequence[DamageFile]


def declared(subject: Subject, world: World) -> Rules:
    """Return the rules that the adapter's declaration allows."""
    capable = subject.info.capabilities
    world = replace(world, overwrites=subject.info.saves_over)
    may: dict[type[Rule], bool] = {
        BeginAnew: world.overwrites,
        DieInSave: bool(world.deaths),
        DamageFile: True,
        LoadStep: "explicit_step" in capable,
        KeepLast: "retention" in capable,
    }
    vocabulary = frozenset(kind for kind, is_allowed in may.items() if is_allowed)
    return Rules(world, vocabulary, subject.sample(DAMAGES, quick=1))


def sound(subject: Subject, rules: Rules) -> Rules:
    """Find which rules hold by themselves.

    A rule that leaves the model in its plainest script is the matter of a check of its own: it is
    left out, and what remains is what only a sequence shows.
    """
    world = rules.world

    def holds(*script: Rule, **change: Any) -> bool:  # noqa: ANN401  fields of a World
        return not fails(subject, replace(world, **change), list(script))

    def may_die(death: Fault) -> bool:
        return holds(SAVE, DieInSave(0), LOAD, LOAD, SAVE, LOAD, deaths=[death])

    world = replace(world, overwrites=world.overwrites and holds(SAVE, BEGIN, SAVE, LOAD))
    world = replace(world, deaths=[death for death in world.deaths if may_die(death)])
    damages = [damage for damage in rules.damages if holds(SAVE, SAVE, damage, LOAD)]
    steps = LoadStep in rules.vocabulary and holds(SAVE, SAVE, LoadStep(0))
    keep = KeepLast in rules.vocabulary and holds(KEEP, SAVE, SAVE, SAVE, LOAD)
    if keep and steps and world.overwrites:  # the step just saved stays, below larger ones too
        keep = holds(KEEP, SAVE, SAVE, SAVE, BEGIN, SAVE, LoadStep(0))
    are: dict[type[Rule], bool] = {
        BeginAnew: world.overwrites,
        DieInSave: bool(world.deaths),
        DamageFile: bool(damages),
        LoadStep: steps,
        KeepLast: keep,
    }
    vocabulary = frozenset(kind for kind, is_sound in are.items() if is_sound)
    return Rules(world, vocabulary, damages)


def failing(subject: Subject, rules: Rules) -> tuple[list[Rule], Violation] | None:
    """Run the scripts of the rules; give the first that leaves the model."""
    can_go_back = LoadStep in rules.vocabulary
    every = moves(rules.vocabulary, rules.damages)
    scripts = covering.scripts(every, subject.rng, can_go_back=can_go_back)
    if subject.budget == "full":
        scripts += draw(rules.vocabulary, rules.damages, subject)
    for script in scripts:
        violation = fails(subject, rules.world, script)
        if violation:
            return script, violation
    return None


def shorten(subject: Subject, world: World, script: list[Rule], first: Violation) -> Violation:
    """Leave out rules as long as the script still leaves the model."""
    shortest, budget, at = first, SHORTEN, len(script) - 1
    while at >= 0 and budget:
        budget -= 1
        shorter = script[:at] + script[at + 1 :]
        still = fails(subject, world, shorter)
        if still:
            script, shortest = shorter, still
        at -= 1
    return shortest


@check("CKC-RTRP-020")
def test_no_sequence_of_operations_leaves_the_model(subject: Subject) -> None:
    """After any sequence of saves, loads, deaths and damage, a load gives what was saved.

    Why: many bugs show at the save after the crash, or at the load after the second run; a check
    of one fault at a time does not meet them (A10, A11, A12, C11, D09).
    How: scripts in which each move (train, save, load, load a step, rotate, delete or damage a
    file, die inside a save, restart, begin anew) comes after each other one, at the full budget
    also scripts that are drawn; run them against a model of what may come. Where one fails, moves
    that leave the model by themselves are left out; shorten the first script that fails without
    them.
    """
    rules = declared(subject, world_of(subject))
    found = failing(subject, rules)
    if not found:
        return
    fewer = sound(subject, rules)
    if fewer != rules:
        rules, found = fewer, failing(subject, fewer)
    if found:
        raise shorten(subject, rules.world, *found)
