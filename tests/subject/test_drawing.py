"""What a check draws hangs on the seed of the session, and on no profile of Hypothesis."""

from __future__ import annotations

from hypothesis import settings

from ckpt_conformance.subject import drawing


def test_no_profile_changes_what_a_check_draws() -> None:
    before, default = repr(drawing.quiet(10)), settings.get_current_profile_name()
    other = settings(
        derandomize=True, print_blob=True, max_examples=3, deadline=9, report_multiple_bugs=True
    )
    settings.register_profile("of_a_test", other)
    try:
        settings.load_profile("of_a_test")
        assert repr(drawing.quiet(10)) == before
    finally:
        settings.load_profile(default)
