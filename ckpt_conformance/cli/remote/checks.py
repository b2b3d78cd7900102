"""What a worker of a cluster does for `certify` and `mutants`: checks, as its batches name them."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ckpt_conformance.contract import registry
from ckpt_conformance.contract.registry import AdapterInfo
from ckpt_conformance.plugin import batches, depends, openings, plan
from ckpt_conformance.plugin.openings import Seen
from ckpt_conformance.plugin.options import CheckOptions, SessionOptions
from ckpt_conformance.plugin.plan import CheckItem
from ckpt_conformance.report import environment
from ckpt_conformance.report.certificate import plain
from ckpt_conformance.subject import bundle
from ckpt_conformance.work.identity import Identity, identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpt_conformance.cluster.runner import Feed
    from ckpt_conformance.contract.verdicts import CheckOutcome
    from ckpt_conformance.harness.client import Server

Environment = dict[str, str | int | None]
FUNCTION = "ckpt_conformance.cli.remote.checks:run_checks"


class Request(Struct, frozen=True):
    """What was asked for, and of which adapters the client wants the description."""

    options: dict[str, Any]  # as CheckOptions writes them
    described: tuple[str, ...]
    keeps_bundles: bool
    notes_opened: bool = False  # whether the client has a cache


class Facts(Struct, frozen=True):
    """What a worker says of its machine and of the adapters there."""

    machine: dict[str, Any]
    environment: Environment
    infos: dict[str, AdapterInfo]
    seen: dict[str, Seen]  # what these depend on


class _Sent(Struct, frozen=True):
    """The part of a result that is for the cache."""

    seen: Seen = Seen()


def identity_of(adapters: Sequence[str]) -> Identity:
    """Return what results depend on: the suite, versions, and the code of each adapter."""
    own = own_identity_of(adapters)
    return identity(environment.suite_commit(), own.values, own.files)


def own_identity_of(adapters: Sequence[str]) -> Identity:
    """Return the part of it that is of the adapters: those that are not of this suite."""
    versions = {f"adapter {name}": depends.adapter_version(name) for name in adapters}
    named = {name: version for name, version in versions.items() if version}
    return Identity(named, files=depends.own_code(adapters))


def run_checks(feed: Feed) -> None:
    """Run the checks of each batch in a pytest session, against a fork server of our own."""
    from ckpt_conformance.harness.client import Server

    request = msgspec.json.decode(feed.job.request, type=Request)
    options = CheckOptions.from_plain(request.options)
    feed.require(identity(environment.suite_commit(), {}))
    for name in options.adapters:
        registry.check_name(name)
    with Server(options.adapters, notes_opened=request.notes_opened) as server:
        facts = _facts(server, request, options)  # what cannot be imported is told first
        feed.require(own_identity_of(options.adapters))
        plan.checks()  # imports the suites now, and not in the first batch
        feed.ready(facts)
        given = {name: getattr(options, name) for name in CheckOptions.__dataclass_fields__}
        session = replace(
            SessionOptions(**given),
            server=str(server.socket),
            out=feed.files if request.keeps_bundles else None,
        )
        batches.run(_checks(feed), session, server, lambda outcome: _put(feed, server, outcome))


def _checks(feed: Feed) -> Iterator[tuple[CheckItem, ...]]:
    for batch in feed:
        yield tuple(msgspec.json.decode(item, type=CheckItem) for item in batch.items)


def _put(feed: Feed, server: Server, outcome: CheckOutcome) -> None:
    feed.put(item_of(outcome), encode(outcome, _seen(server, outcome.adapter)), outcome.seconds)


def _seen(server: Server, adapter: str) -> Seen:
    if not server.notes_opened:
        return Seen()
    return openings.of_adapter(server.folder, adapter, server.adapters)


def seen_in(content: bytes) -> Seen:
    """Return what a result depends on that a worker sent; `content` may be empty."""
    return msgspec.json.decode(content, type=_Sent).seen if content else Seen()


def item_of(outcome: CheckOutcome) -> str:
    """Name the item of the plan that an outcome belongs to."""
    return f"{outcome.adapter} {outcome.check}"


def encode(outcome: CheckOutcome, seen: Seen | None = None) -> bytes:
    """Write an outcome as the result of a line; on its way to the client with what was seen."""
    more: dict[str, Any] = {"evidence": plain(outcome.evidence)}
    if seen is not None:
        more["seen"] = seen
    return msgspec.json.encode(outcome.to_message() | more)


def _facts(server: Server, request: Request, options: CheckOptions) -> msgspec.Raw:
    """Describe this machine and the adapters; raises registry.AdapterError, RequestError."""
    from ckpt_conformance.harness import facts

    scratch = Path(tempfile.gettempdir())
    infos = facts.describe(server, options.adapters, request.described, options.device)
    machine = depends.machine(environment.filesystem_type(scratch))
    seen = {name: _seen(server, name) for name in request.described}
    described = Facts(machine, environment.describe_environment(scratch), infos, seen)
    return msgspec.Raw(msgspec.json.encode(described))


# -- at the client --------------------------------------------------------------------------------


def together(environments: Iterable[Mapping[str, str | int | None]]) -> Environment:
    """Describe several machines as one: what differs between them is listed."""
    values = defaultdict[str, dict[str | int | None, None]](dict)
    for described in environments:
        for name, value in described.items():
            values[name][value] = None
    return {
        name: next(iter(seen)) if len(seen) == 1 else ", ".join(sorted(map(str, seen)))
        for name, seen in values.items()
    }


def unpack_bundles(archive: bytes, out: Path) -> None:
    """Put the bundles that a worker sent where the session would have kept them.

    An older bundle of the same check is replaced; raises bundle.BundleError for a folder of that
    name that is none of ours.
    """
    with tempfile.TemporaryDirectory(prefix="ckc-bundles-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, filter=_safe)  # noqa: S202  which refuses what leads out
        for source in sorted(Path(folder).glob("**/bundles/*")):
            target = out / source.relative_to(folder)
            if target.exists():
                bundle.read(target)
                shutil.rmtree(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)


def _safe(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Leave out what would be written elsewhere, such as a link that leads out of the bundle."""
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None
