"""Scripts for an upstream report: they need torch and the manager, and nothing of this project."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpt_conformance.crash.explore.exploration import ViolationRecord

HEAD = '''"""$summary

Library: $library $version. Found by ckpt-conformance under the persistence model $model:
$where
`checkpoints/` beside this script is what a crash can leave. Run: python repro.py
Exit status: 1 while the problem is there, 0 when it is gone, 3 if this script can't tell.
"""

import hashlib
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
HERE = Path(__file__).resolve().parent


def tensors(state, path=""):
    if isinstance(state, torch.Tensor):
        flat = state.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        yield path, hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{path}/{key}")
    elif isinstance(state, (list, tuple)):
        for at, value in enumerate(state):
            yield from tensors(value, f"{path}/{at}")

'''

LOAD = {
    "torch": '''
def load(root):
    """Load the newest file, as a job that restarts does."""
    files = [path for path in root.iterdir() if path.suffix == ".pt"]
    newest = max(files, key=lambda path: int("".join(filter(str.isdigit, path.stem)) or 0))
    return torch.load(newest, weights_only=True)
''',
    "safetensors": '''
def load(root):
    """Load the newest file, as a job that restarts does."""
    from safetensors.torch import load_file

    files = [path for path in root.iterdir() if path.suffix == ".safetensors"]
    newest = max(files, key=lambda path: int("".join(filter(str.isdigit, path.stem)) or 0))
    step = newest.stem.split("-")[-1]
    beside = [path for path in root.iterdir() if path.name.endswith(f"-{step}.pt")]
    rest = [torch.load(path, weights_only=True) for path in beside]
    return {"file": load_file(newest), "rest": rest}
''',
    "torch.distributed.checkpoint": '''
def load(root):
    """Load the newest directory, as a job that restarts does."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folders = [path.parent for path in root.glob("*/.metadata")]
    newest = max(folders, key=lambda path: int("".join(filter(str.isdigit, path.name)) or 0))
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(newest, Path(folder) / "all.pt")
        return torch.load(Path(folder) / "all.pt", weights_only=False)
''',
}

UNKNOWN = '''
def load(root):
    """Fill this in: load the newest checkpoint below `root` with the manager's own calls."""
    print("repro.py: fill in load(root) for this manager; the directory is", root)
    sys.exit(3)
'''

MAIN = '''

def fresh(tree):
    """Copy a tree to where the job had it, or to a temporary folder."""
    target = Path(tempfile.mkdtemp()) / "checkpoints"
    shutil.copytree(tree, target, symlinks=True)
    return target


def main():
    whole = {}
    for tree in sorted((HERE / "legal").glob("*")):
        whole[tree.name] = dict(tensors(load(fresh(tree))))
        print(f"{tree.name}: loads, {len(whole[tree.name])} tensors")
    try:
        found = dict(tensors(load(fresh(HERE / "checkpoints"))))
    except Exception as error:
        print(f"after the crash: {type(error).__name__}: {str(error)[:300]}")
        return 1
    served = [name for name, want in whole.items() if want == found]
    print(f"after the crash: loads; it is {', '.join(served) or 'none of the whole checkpoints'}")
    for name, want in whole.items():
        same = sum(found.get(key) == value for key, value in want.items())
        print(f"  {same} of {len(want)} tensors are those of {name}")
    return 0 if set(served) & set(FINE) else 1


if __name__ == "__main__":
    sys.exit(main())
'''


def render(template: str, record: ViolationRecord, saver: str = "", **values: object) -> str:
    """Fill in a template of a script, where `$name` stands for a value.

    `$summary`, `$model` and `$where` come from the violation; `saver` is the adapter that saved.
    """
    after = f"a crash of {saver}" if saver else "a crash"
    return string.Template(template).substitute(
        summary=_plain(f"{record.outcome} after {after}: {record.summary}"),
        model=repr(record.model),
        where=_plain(record.where),
        **values,
    )


def script(
    library: str, version: str, adapter: str, record: ViolationRecord, fine: Collection[str]
) -> str:
    """Write the script of one bundle; `fine` are the trees below `legal/` that may be loaded."""
    head = render(HEAD, record, adapter, library=library, version=version)
    load = LOAD.get(library, UNKNOWN)
    return f"{head}\nFINE = {list(fine)!r}  # what may be served\n{load}{MAIN}"


def _plain(text: str) -> str:
    """Keep foreign text from ending the docstring."""
    return text.replace("\\", "/").replace('"""', "'''").strip()
