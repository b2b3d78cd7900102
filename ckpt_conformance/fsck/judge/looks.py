"""Judge files that no layout knows: what a load of them may run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_conformance.fsck.code import any_file, any_script
from ckpt_conformance.fsck.formats import (
    dcp,
    torch_file,
    torchscript,
    written_names,
)
from ckpt_conformance.fsck.layouts import leftovers
from ckpt_conformance.fsck.layouts.layouts import is_text
from ckpt_conformance.fsck.source.findings import (
    Finding,
    Kind,
    Malformed,
    OutOfTime,
    Report,
    Topic,
)
from ckpt_conformance.fsck.source.source import DEEPEST
from ckpt_conformance.fsck.source.sums import unreadable
from ckpt_conformance.fsck.source.untrusted import clip

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_conformance.fsck.judge.context import Context
    from ckpt_conformance.fsck.source.source import Folder
    from ckpt_conformance.fsck.source.sums import Work


def no_archive(folder: Folder, name: str, bad: Finding) -> list[Finding]:
    """Judge a file that is no archive; `bad` says so, where it holds no pickle either."""
    try:
        stream = _stream_of(folder, name)
    except OutOfTime as error:  # nobody knows whether it is one of another format
        return [unreadable(name, error)]
    if stream is None:
        return [bad]
    found = _names_of(name, stream)
    unsafe = [finding for finding in found if finding.kind is Kind.UNSAFE]
    if stream.is_archive or (stream.problem and not stream.is_legacy and not stream.is_limit):
        return [bad, *unsafe]
    return [_unchecked(name, stream, may="" if unsafe else ": save it anew"), *found]


def _unchecked(name: str, stream: torch_file.Stream, may: str) -> Finding:
    """Say why pickles are not checked, and what one `may` do."""
    if not stream.is_legacy:
        plain = (
            "it is a plain pickle: torch.load runs it, then refuses it; nothing in it is checked"
        )
        return Finding(Kind.UNKNOWN, name, stream.problem or plain)
    if stream.problem:
        what = f"it has the format of torch before 1.6: {stream.problem}"
        return Finding(Kind.DAMAGED, name, what)
    what = f"it has the format of torch before 1.6, which cannot be checked{may}"
    return Finding(Kind.UNKNOWN, name, what)


def unreferenced_part(context: Context, name: str) -> None:
    """Report a file in a folder of DCP that nothing refers to; what it runs is unsafe."""
    what = "nothing refers to this file: another program left it?"
    context.report.say(Kind.NOTE, name, what)
    look(context, name)


def unknown_name_part(context: Context, name: str) -> None:
    """Report that a file under a name of no library was not judged; what it runs is unsafe."""
    what = "no library writes this name, and it is no file of torch.save: it was not judged"
    context.report.say(Kind.NOTE, name, what)
    stream = look(context, name)
    if stream:
        found = _names_of(name, stream)
        context.report.findings += [one for one in found if one.kind is Kind.NOTE]


def pickle_part(context: Context, name: str) -> None:
    """Judge a plain pickle: its instructions to the end, and the names that it asks for."""
    report, stream = context.report, look(context, name)
    if stream is None:
        what = "it begins as a pickle does, and none can be read from it: cut short?"
        report.say(Kind.DAMAGED, name, what)
        return
    if stream.problem and not stream.is_limit:
        report.say(Kind.DAMAGED, name, f"a plain pickle: {stream.problem}")
        return
    report.findings += [one for one in _names_of(name, stream) if one.kind is Kind.NOTE]
    what = "this is a plain pickle; judged: that it ends, and which names it asks for"
    report.say(Kind.NOTE, name, what)


def other_part(context: Context, name: str) -> None:
    """Look at a file that no layout knows; what runs nothing is passed over, and listed."""
    before = len(context.report.findings)
    look(context, name)
    if len(context.report.findings) == before:
        context.report.passed_over.append(name)


def linked_part(context: Context, name: str) -> None:
    """Look at a file in a folder that a link leads to: who loads it by this name runs its code."""
    look(context, name)


def leftover_part(context: Context, name: str) -> None:
    """Look at a file of work in progress: it may break off anywhere, and run code until there."""
    own = replace(context, report=Report(context.report.path, ""))
    look(own, name)
    context.report.findings += [one for one in own.report.findings if one.kind is Kind.UNSAFE]
    meant = leftovers.meant_by(name)
    if meant is not None and context.folder.entry(meant) is None:
        why = f"{name.rpartition('/')[2]} is there: a copy, or a save, that did not end"
        context.report.say(Kind.MISSING, meant, why)


def deep_part(context: Context, name: str) -> None:
    """Report a folder that is not looked into."""
    what = f"it is inside of more than {DEEPEST} folders, and not looked into: give its own path"
    context.report.say(Kind.UNKNOWN, name, what, topic=Topic.TOO_LARGE)


def denied_part(context: Context, name: str) -> None:
    """Report a folder that may not be read: nobody knows what is in it."""
    what = "this folder is not readable by this user: run as one who may"
    context.report.say(Kind.UNKNOWN, name, what, topic=Topic.PERMISSION)


def empty_part(context: Context, base: str, names: Collection[str]) -> list[Work]:
    """Report a step in which no file holds a state; `names` are all files of it."""
    strange = [name for name in names if not (is_text(name) or leftovers.is_below(name))]
    for name in strange:
        other_part(context, base + name)
    if strange:
        what = f"none of its files has a format that fsck knows: {clip(strange[0])}"
        context.report.say(Kind.UNKNOWN, "", what)
    else:
        what = "no file in it holds a state: did the save not end?"
        context.report.say(Kind.MISSING, "", what, topic=Topic.COMMIT)
    return []


def look(context: Context, name: str) -> torch_file.Stream | None:
    """Report what a load of a file that nobody judges may run."""
    _look_at_script(context, name)
    try:
        stream = _stream_of(context.folder, name)
    except OutOfTime as error:
        context.refuse(name, error)
        return None
    if stream is None:
        return None
    unsafe = [
        Finding(Kind.UNSAFE, name, torchscript.unsafe(why), name=written_names.ANY)
        for why in torchscript.classes(stream.asked)
    ]
    unsafe += [one for one in _names_of(name, stream) if one.kind is Kind.UNSAFE]
    context.report.findings += unsafe
    if stream.is_limit and not unsafe:
        what = f"nobody knows what code a load of it runs: {stream.problem}"
        context.report.say(Kind.UNKNOWN, name, what)
    return stream


def _look_at_script(context: Context, name: str) -> None:
    """Report what a load of TorchScript runs, whatever the name of its file."""
    try:
        with context.folder.open(name) as file:
            why = [*any_script.of_any(file, context.folder.size(name))]
    except (OSError, Malformed):
        return
    for one in why:
        finding = Finding(Kind.UNSAFE, name, one, name=written_names.ANY)
        context.report.findings.append(finding)


def _stream_of(folder: Folder, name: str) -> torch_file.Stream | None:
    """Read the pickles at the beginning of a file; None where it begins with none."""
    try:
        with folder.open(name) as file:
            return any_file.read(file, folder.size(name), name)
    except OutOfTime:
        raise
    except (OSError, Malformed):
        return None


def _names_of(name: str, stream: torch_file.Stream) -> list[Finding]:
    asked = stream.asked
    if name.rpartition("/")[2].startswith(
        dcp.METADATA
    ):  # a copy of it, or one that was not renamed
        asked = dcp.without_its_own(asked)
    return [
        Finding(kind, name, f"it {text}", name=asked_for)
        for kind, text, asked_for in written_names.judge_names(asked, (torch_file.SCRIPT,))
    ]
