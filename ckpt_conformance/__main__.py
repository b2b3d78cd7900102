"""`ckpt-conformance`, and `python -m ckpt_conformance`: only what the command needs is imported."""

from __future__ import annotations

import importlib
import sys

ON_DISK = ("fsck", "corrupt", "drill", "diff")
INTERRUPTED = 130  # as `cli.stopping` has it, which may not be imported yet


def main() -> None:
    """Run the command that the first word names."""
    try:
        name = "disk" if sys.argv[1:2] and sys.argv[1] in ON_DISK else "main"
        command = importlib.import_module(f"ckpt_conformance.cli.{name}")
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("ckpt_conformance"):
            raise
        sys.stderr.write(
            f"error: the command line needs {missing.name}, which is not installed; "
            "install it with: pip install 'ckpt-conformance[cli]'\n"
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("Stopped before anything was begun.\n")
        raise SystemExit(INTERRUPTED) from None
    command.main()


if __name__ == "__main__":
    main()
