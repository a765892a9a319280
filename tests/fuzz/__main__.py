"""`python -m tests.fuzz`: a table of outcomes by kind; exit code 1 if there was a finding."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.kinds import SUBJECTS
from tests.fuzz.runner import fuzz


def main() -> int:
    """Fuzz every kind; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="number of inputs, all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=SUBJECTS, action="append", help="this kind only; may be repeated")
    parser.add_argument("--only", type=int, help="one input of one kind, here and with its traceback")
    options = parser.parse_args()
    kinds = options.kind or list(SUBJECTS)
    with tempfile.TemporaryDirectory() as folder:
        if options.only is not None:
            subject = SUBJECTS[kinds[0]](Path(folder) / "base", Path(folder) / "scratch")
            print(subject.outcome(options.seed, options.only))
            return 0
        findings = [fuzz(kind, options.seed, -(-options.inputs // len(kinds)), Path(folder)) for kind in kinds]
    return 1 if any(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
