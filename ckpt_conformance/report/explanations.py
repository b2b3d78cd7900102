"""What `fsck --explain TOPIC` says: what a finding means, what a load does with it, what to do."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from ckpt_conformance.contract.requests import RequestError, nearest
from ckpt_conformance.fsck.source.findings import Topic

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTH = 96  # columns of a text


class Explanation(NamedTuple):
    """One topic in words.

    Attributes:
        means: what was found, and what does such a thing.
        load: what the libraries do when they load it.
        check: how to see it without fsck.
        do: what to do next.
        next: the same in some words, for one line of a report; empty where nothing is to be done.

    """

    means: str
    load: str
    check: str
    do: str
    next: str = ""


EXPLANATIONS = {
    Topic.CHECKSUM: Explanation(
        "Bytes differ from the digest or the CRC-32 that was written with them: a disk, a "
        "network, a copy or memory changed them after the save, or in the middle of it.",
        "torch.load, DCP and safetensors compare no checksum of payload: the changed numbers are "
        "served. zip tools and the reference manager refuse.",
        "`unzip -t FILE` for archives of torch; `sha256sum` of this copy and of another one.",
        "Do not resume from it. Take an older checkpoint (`fsck RUN --newest-whole`), or another "
        "copy of this one. If copies differ, look at the disk, and at what copied it.",
        "take an older one, or another copy of it",
    ),
    Topic.STRUCTURE: Explanation(
        "A header, an index or a pickle contradicts itself, the file, or another file: something "
        "that no save writes. Mostly the file was overwritten, cut, or mixed with another one.",
        "Most loads raise; some serve what is left, or zeros.",
        "Load it on a machine that you can spare, with weights_only=True.",
        "Take an older checkpoint (`fsck RUN --newest-whole`), or another copy of this one.",
        "take an older one, or another copy of it",
    ),
    Topic.SIZE: Explanation(
        "The file is shorter or longer than what refers to it says: a save that was killed, a "
        "full disk, an upload that was cut short.",
        "A load raises where bytes are missing; readers that map files may serve zeros, or die.",
        "`ls -l FILE`, here and where it was copied from; `df` of the disk.",
        "Copy it again if the original is whole. Take an older checkpoint (`fsck RUN --newest-"
        "whole`), or another copy of this one.",
        "copy it again, or take an older one",
    ),
    Topic.ANOTHER_SAVE: Explanation(
        "Files of one checkpoint disagree about the step, the number of ranks, or what was "
        "counted: some are of another save, as after a copy by hand, a partial restore, or a save"
        " that wrote over an older one and was killed.",
        "Every file loads by itself, so nothing is raised: the job goes on from a mixture.",
        "Compare the times of the files, and the steps in them.",
        "Put the files of one save together, or take another checkpoint.",
        "put the files of one save together, or take an older one",
    ),
    Topic.ROLE: Explanation(
        "A file holds the state of something else than its name says: two files have changed "
        "places, or one was copied over the other.",
        "load_state_dict raises in most cases; with strict=False, or of two alike, it does not.",
        "Load both files with weights_only=True, and look at their keys.",
        "Rename them back, if both are whole, and judge again.",
        "rename the files back, or take an older one",
    ),
    Topic.ABSENT: Explanation(
        "A file is missing that an index, a manifest, numbers in names, or the library's own "
        "rules say must be there.",
        "A load raises, or starts that part anew without a word (generators, schedulers).",
        "`ls` here, and where it was copied from; the log of the save.",
        "Copy what is missing. Take an older checkpoint (`fsck RUN --newest-whole`), or another "
        "copy of this one.",
        "copy what is missing, or take an older one",
    ),
    Topic.COMMIT: Explanation(
        "What the library writes last is missing, so the save did not end: it was killed, it "
        "failed, or it goes on at this moment.",
        "The library does not list it, or raises.",
        "Look whether a process still writes there (`lsof +D DIR`), and into the log of the save.",
        "If it is being written, judge it again later. Else take an older checkpoint (`fsck RUN "
        "--newest-whole`), or another copy of this one.",
        "being written? judge it again later; else take an older one",
    ),
    Topic.RUNS_CODE: Explanation(
        "A pickle asks for a name that is not in the list of fsck. To load it may run "
        "what it says: that can be a class of your team, or an attack.",
        "torch.load(weights_only=False), pickle.load and joblib import and call it at once.",
        "`python -m pickletools FILE` shows what it asks for; ask who made the file.",
        "Load it nowhere until you know. If the name is yours: --allow-name MODULE.NAME.",
        "load it nowhere; if the name is yours: --allow-name",
    ),
    Topic.LINK: Explanation(
        "A symbolic link leads out of the folder that was judged, or to nothing. It is not "
        "followed: what it leads to is not part of what you have named.",
        "A load follows it, on machines where it leads somewhere.",
        "`readlink -f FILE`.",
        "Judge the folder that it leads to, or copy the file into the checkpoint.",
        "judge the folder that the link leads to",
    ),
    Topic.TOO_LARGE: Explanation(
        "A structure is larger than what is read of files that nobody vouches for. Nothing is "
        "known to be wrong with it.",
        "A load reads it, and takes the memory that it asks for.",
        "`ls -l FILE`; docs/fsck.md has the limits.",
        "If it is yours, and real, load it once to see; please report it.",
        "if it is yours, and real, load it once to see",
    ),
    Topic.OUT_OF_TIME: Explanation(
        "Reading took longer than --timeout or --file-timeout allows, or a read did not come back.",
        "A load waits as long, or for ever.",
        "`dd if=FILE of=/dev/null`; `dmesg` for errors of the disk; the state of the mount.",
        "Give it more time, or mend the disk or the network.",
        "give it more time, or look at the disk or the network",
    ),
    Topic.UNREACHABLE: Explanation(
        "A store did not give the bytes, or gave fewer than it says there are, three times; or no"
        " worker of the cluster could judge it.",
        "A load fails, or tries again.",
        "Get the object with the store's own tool.",
        "Judge it again when the store answers. Nothing is known of the checkpoint until then.",
        "judge it again when the store answers",
    ),
    Topic.PERMISSION: Explanation(
        "This user may not read the file.",
        "A load as this user raises PermissionError.",
        "`namei -l FILE` shows who may do what on the way to it.",
        "Judge it as the user who will load it.",
        "judge it as the user who will load it",
    ),
    Topic.GONE: Explanation(
        "It was listed, and was not there any more when it was read: rotation has removed it.",
        "It can not be loaded any more.",
        "List the folder again.",
        "Nothing, if your job rotates. Judge again for a report without it.",
        "nothing, if your job rotates",
    ),
    Topic.CHANGING: Explanation(
        "Each time it was judged, some of its files came, went or were written to meanwhile: a job "
        "saves or rotates there now, or its folder holds a file that is always written to.",
        "A load may meet the files of two saves, or none.",
        "Look which process writes there (`lsof +D DIR`).",
        "Judge it again when nobody writes; `--pin DIR` holds a checkpoint while it is judged.",
        "judge it again when nobody writes, or hold it by --pin DIR",
    ),
    Topic.NOT_JUDGED: Explanation(
        "Something keeps fsck from judging it: a format that it cannot read, or a package that is"
        " missing; the finding says which. Nothing is known to be wrong with it.",
        "A load may work.",
        "Load it where that is safe.",
        "Do what the finding says, and judge it again.",
        "do what the finding says, and judge it again",
    ),
    Topic.NO_CHECKSUM: Explanation(
        "The records were written without a CRC (torch.serialization.set_crc32_options(False)).",
        "It loads. Changed bytes cannot be told from right ones.",
        "`unzip -lv FILE` shows 00000000 as CRC.",
        "Leave CRCs on, or keep digests of your own; a gate can ask for --require-coverage.",
    ),
    Topic.FEWER_FILES: Explanation(
        "The newest step lacks files which all other steps of the run have, or holds an optimizer "
        "and no model. It may have been copied in part, or its save may have been killed; or it was"
        " saved so on purpose: weights alone at the end, fewer ranks, a part in another folder.",
        "A load raises, or starts that part anew without a word: fsck cannot know.",
        "`ls` this step and the one before; the log of the save.",
        "`fsck RUN --newest-whole` passes over it where an older one is whole. If it was meant so, "
        "name it yourself.",
        "was it copied in part? else name it yourself",
    ),
    Topic.WEIGHTS_ALONE: Explanation(
        "It holds a model and no optimizer, while other checkpoints below the same folder hold "
        "one: an export, an average of weights, the best one, or a step that was saved so.",
        "A run that resumes from it starts its optimizer cold, and many scripts raise a KeyError.",
        "`fsck RUN --json`: which checkpoints have this topic; the save calls of the script.",
        "`fsck RUN --newest-whole` passes over it where another one is whole. To evaluate or "
        "export, name it yourself.",
        "is it an export? to resume, take one with an optimizer",
    ),
    Topic.OTHER_TENSORS: Explanation(
        "Weights or optimizer of this step have tensors of other names or shapes than all other "
        "steps of the run, which are the same: a file of another model, one that was not "
        "gathered or saved in part, or a model that grows.",
        "A load raises, or leaves the weights that it does not find as they were made: at random.",
        "The names and shapes of both: `ckpt-conformance diff THIS_STEP THE_ONE_BEFORE`.",
        "`fsck RUN --newest-whole` passes over the newest step where an older one is whole. If the "
        "model has grown, name it yourself.",
        "is it of this model? else take an older one",
    ),
    Topic.REMARK: Explanation(
        "Something worth knowing that changes no state; the finding says what.",
        "It loads.",
        "-",
        "Nothing, if it is meant.",
    ),
}


OF_LINES = {
    "leftover": Explanation(
        "A name of work in progress (`*.tmp`, `tmp-*`, `*.old`, `*.bak`, ...): a save or a copy "
        "that goes on, or that was killed.",
        "No library loads it by itself.",
        "Look whether a process still writes there (`lsof +D DIR`).",
        "Remove it when nobody writes to it any more; fsck removes nothing.",
    ),
    "pointer": Explanation(
        "The run's own pointer to its newest checkpoint (`latest`, "
        "`latest_checkpointed_iteration.txt`) names nothing, what is not there, or another "
        "checkpoint than the newest whole one.",
        "A resume loads what the pointer names, and fails where that is not there.",
        "`cat latest`, and `ls` beside it.",
        "Give the step to resume from by its name, or write that into the pointer.",
    ),
    "not-finite": Explanation(
        "A tensor has NaNs or infinities (`--nan`): the bytes are as they were written.",
        "It loads; what is computed with it is NaN, too.",
        "torch.isfinite(tensor).all() of the loaded state.",
        "Look at the loss before that step; resume from a step before it.",
    ),
    "passed-over": Explanation(
        "A file of no layout that fsck knows. It was looked at for code that a load may run, and "
        "nothing else.",
        "That depends on who loads it.",
        "`file FILE`.",
        "Nothing, if it is meant to be there.",
    ),
}
"""What a line of a report is about that is no finding of a checkpoint."""

_VERDICTS = {
    "damaged": "Bytes, sizes or structure are not what was written.",
    "incomplete": "Something that must be there is missing.",
    "unsafe": "A file in it may run code where it is loaded.",
    "unknown": "It could not be judged.",
}


def lines(topic: str) -> Iterator[str]:
    """Yield the lines of one topic, or of a word of a report; RequestError for another one."""
    if topic in _VERDICTS:
        yield topic
        yield f"  {_VERDICTS[topic]} The finding says why; its topic is in the last lines of a"
        yield f"  report and in --json. Topics: {', '.join(Topic)}"
        return
    known = [*map(str, Topic), *OF_LINES]
    if topic not in known:
        listed = ", ".join(known)
        raise RequestError(
            f"no finding is about {topic!r}; {nearest(topic, known)}topics: {listed}"
        )
    told = OF_LINES[topic] if topic in OF_LINES else EXPLANATIONS[Topic(topic)]
    heads = ("what it means", "what a load does", "how to check", "what to do")
    yield topic
    for head, text in zip(heads, told[: len(heads)], strict=True):
        yield f"  {head}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
