"""The families that other checks stand on, as controls.

A check of another family verifies one of these checks first, or names it when a run without faults
goes wrong: then the verdict is UNKNOWN, with a reference to the promise that is really broken. So
modules of `suites` import these, and never one another.
"""
