"""What a certificate costs, by check and by kind of child, in core-seconds (user and system).

A check pays for its children, for what the fork server does for them (fork, wait, sweep), and for
its own work in the process of pytest. A child is of the kind of its operations, such as
`run+close`; with `exec` it became an interpreter of its own, and `supervised` means that its system
calls were followed. Ranks of one recorded group are in no row of kinds.

    python benchmarks/bench_quick.py [ADAPTER] [--budget quick] [--only ID ...] [--checks 40]

Beside other work on the same cores the figures grow by some tenths: compare those of one run, or of
runs that took turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_conformance.harness.client import Client
from ckpt_conformance.harness.server import supervision_of
from ckpt_conformance.plugin import STATE
from ckpt_conformance.plugin.options import SessionOptions
from ckpt_conformance.plugin.session import run_session
from ckpt_conformance.subject.checks import invariant_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from ckpt_conformance.harness.messages import Program

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """Core-seconds of one check or one kind of child."""

    children: int = 0
    child: float = 0.0  # of children, with all that they started
    server: float = 0.0
    own: float = 0.0  # of pytest's process
    largest: float = 0.0  # of one child

    @property
    def all(self) -> float:
        """The sum."""
        return self.child + self.server + self.own


@dataclass
class Meter:
    """A plugin of pytest that reads clocks around each check, and what each child cost."""

    checks: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    kinds: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    now: Cost = field(default_factory=Cost)  # of the check that runs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure one check with its fixtures."""
        name = f"{invariant_of(item)} {item.name.partition('[')[0]}"
        state = item.config.stash[STATE]
        state.socket()  # so that the first check does not pay for the start of the server
        self.now = self.checks[name]
        server, own = self._server(state), time.process_time()
        try:
            return (yield)
        finally:
            self.now.own += time.process_time() - own
            self.now.server += self._server(state) - server

    @staticmethod
    def _server(state: Any) -> float:  # noqa: ANN401  the plugin's own
        server = state.server
        return own_seconds(server.process.pid) if server else 0.0

    def note(self, program: Program, cpu: float) -> None:
        """Count a child that has ended."""
        for cost in (self.now, self.kinds[kind_of(program)]):
            cost.children += 1
            cost.child += cpu
            cost.largest = max(cost.largest, cpu)


def own_seconds(pid: int) -> float:
    """Return what a process itself has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def kind_of(program: Program) -> str:
    """Name the operations of a program, each once, and what is special about its process."""
    names = [str(op.__struct_config__.tag) for op in program.ops]
    ops = "+".join(dict.fromkeys(names))[:34]
    special = ["exec"] if program.isolation == "exec" else []
    special += ["record"] if program.record else ["supervised"] if supervision_of(program) else []
    return " ".join([program.job.kind, ops, *special])


def listen(meter: Meter) -> None:
    """Let the meter see each child that ends."""
    receive = Client.receive

    def noting(self: Client, program: Program, skip: int) -> Any:  # noqa: ANN401  ProcessResult
        result = receive(self, program, skip)
        meter.note(program, result.cpu)
        return result

    Client.receive = noting  # type: ignore[method-assign]


def table(costs: dict[str, Cost], title: str, rows: int) -> None:
    """Print the dearest first."""
    heads = ("core s", "children", "theirs", "server", "pytest", "largest")
    print(f"\n{title:<64}" + "".join(f"{head:>9}" for head in heads))
    for name, cost in sorted(costs.items(), key=lambda pair: -pair[1].all)[:rows]:
        seconds = (cost.child, cost.server, cost.own, cost.largest)
        rest = "".join(f"{value:>9.2f}" for value in seconds)
        print(f"{name[:63]:<64}{cost.all:>9.2f}{cost.children:>9}{rest}")


def main() -> None:
    """Certify, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", nargs="?", default="reference")
    parser.add_argument("--budget", choices=("quick", "full"), default="quick")
    parser.add_argument("--only", action="append", default=[], metavar="ID")
    parser.add_argument("--checks", type=int, default=40, help="rows of the table of checks")
    given = parser.parse_args()
    meter = Meter()
    listen(meter)
    before = os.times()
    options = SessionOptions(adapters=(given.adapter,), only=tuple(given.only), budget=given.budget)
    outcomes = run_session(options, meter)
    spent = [after - begun for after, begun in zip(os.times(), before, strict=True)]
    costs = meter.checks.values()
    print(f"{len(outcomes)} outcomes, {sum(cost.children for cost in costs)} children")
    print(
        f"{sum(spent[:4]):.1f} core-seconds, "
        f"{sum(cost.all for cost in costs):.1f} of them in checks: "
        f"{sum(cost.child for cost in costs):.1f} in their children, "
        f"{sum(cost.server for cost in costs):.1f} in the server, "
        f"{sum(cost.own for cost in costs):.1f} in pytest; {spent[4]:.0f} s of wall clock"
    )
    table(meter.checks, "check", given.checks)
    table(meter.kinds, "kind of child", given.checks)


if __name__ == "__main__":
    main()
