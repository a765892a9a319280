"""200 damaged and hostile files; `python -m tests.fuzz` makes 10,000."""

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.kinds import IN_PROCESS, SUBJECTS

INPUTS = 25
SEED = 2026


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_no_input_crashes_hangs_or_passes_as_sound(kind: str, tmp_path: Path) -> None:
    subject = SUBJECTS[kind](tmp_path / "base", tmp_path / "scratch")
    outcomes = Counter(subject.outcome(SEED, index) for index in range(INPUTS))
    assert outcomes["unchanged"] < INPUTS / 2
    assert len(outcomes) > 1 or "refused 74" in outcomes
