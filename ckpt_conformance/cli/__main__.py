"""`python -m ckpt_conformance.cli`: the same as `python -m ckpt_conformance`."""

from ckpt_conformance.__main__ import main

if __name__ == "__main__":
    main()
