"""The pytest process stays light: no suite and no harness module that it needs imports torch."""

from __future__ import annotations

import subprocess
import sys

COLLECT = """
import importlib, pkgutil, sys
import ckpt_conformance.suites as suites
import ckpt_conformance.plugin, ckpt_conformance.plugin.outcomes, ckpt_conformance.plugin.session
for module in pkgutil.walk_packages(suites.__path__, f"{suites.__name__}."):
    importlib.import_module(module.name)
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_the_suites_import_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
