"""What is fuzzed: one subject a kind of file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from mpi_tp.errors import ConfigurationError, FileError, JobError, UsageError

MESSAGE_CHARACTERS = 4100


class Finding(AssertionError):
    """An input did what none may do."""


class Subject:
    """One kind of file. `base` is a folder with sound ones, made once; `read` gives the outcome for changed ones."""

    kind = ""

    def __init__(self, base: Path, scratch: Path) -> None:
        self.base = base
        self.scratch = scratch

    def make(self, rng: random.Random) -> bool:
        """Put a changed copy of the base into the scratch folder; say whether it still holds the same bytes."""
        raise NotImplementedError

    def read(self) -> str:
        """Read what is in the scratch folder as the programs do; return the outcome if nothing was refused."""
        raise NotImplementedError

    def outcome(self, seed: int, index: int) -> str:
        """Make input `index`, read it, and return the outcome. Raises Finding."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(self.base, self.scratch)
        same = self.make(random.Random(f"{self.kind} {seed} {index}"))
        try:
            read = self.read()
        except (FileError, ConfigurationError, UsageError) as error:
            message = str(error)
            if not message.isprintable() or len(message) > MESSAGE_CHARACTERS:
                raise Finding(f"the message is not one line: {message!r:.500}") from error
            return f"refused {error.exit_code}"
        except JobError as error:
            raise Finding(f"{type(error).__name__}: {error}") from error
        return "unchanged" if same else read


def change(path: Path, changed: Callable[[bytes], bytes]) -> bool:
    """Rewrite a file; say whether it is the same as before."""
    before = path.read_bytes()
    after = changed(before)
    path.write_bytes(after)
    return before == after
