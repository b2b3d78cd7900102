"""torchsnapshot restores from payload files that were cut short (CKC-CORR-002, CKC-CORR-005)."""

import os
import pathlib
import sys

import torch
from torchsnapshot import Snapshot


def main() -> None:
    """Take a snapshot, cut every payload file, restore into another model, compare."""
    wrong = []
    for part in (0.0, 0.5, 0.9):
        saved, loaded = (
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(2)
        )
        path = pathlib.Path(f"kept-{part}").resolve()
        Snapshot.take(path=str(path), app_state={"model": saved})
        payload = [name for name in path.rglob("*") if name.is_file() and name.name[0] != "."]
        for file in payload:
            os.truncate(file, int(file.stat().st_size * part))
        try:
            Snapshot(str(path)).restore({"model": loaded})
        except Exception as error:  # whatever refuses
            print(f"{part:.0%} of {len(payload)} files left: refused: {error!r}")
            continue
        now = loaded.state_dict()
        lost = [
            key for key, value in saved.state_dict().items() if not torch.equal(value, now[key])
        ]
        print(f"{part:.0%} of {len(payload)} files left: restored; wrong: {lost}")
        wrong += [f"{part:.0%}"] if lost else []
    print(f"restored without an error, and wrong, of files cut to: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


main()
