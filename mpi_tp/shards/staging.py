"""The folder of a set while it is written: a new set comes whole or not at all, an old one stays until then.

Everything is written into `.incomplete` inside the folder and moved when it is finished, the manifest last. So a
`.incomplete` without a manifest beside it marks all other files as leftovers of a run that was killed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi_tp.errors import ConfigurationError, FileError, StoppedError
from mpi_tp.shards.format import MANIFEST_NAME, TOKENIZER_DIRECTORY

_STAGED = ".incomplete"


class Staging:
    """Holds `directory` for one writer; `path` is where the new set's files are written.

    `close` it in any case. Raises ConfigurationError if the folder holds a set and `overwrite` is off, FileError if
    another writer is at work there, OSError if it cannot be written.
    """

    def __init__(self, directory: Path, overwrite: bool) -> None:
        self._directory = directory
        self.path = directory / _STAGED
        self._created = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory, os.O_RDONLY)
        try:
            self._take(overwrite)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, overwrite: bool) -> None:
        _lock(self._lock, self._directory)
        interrupted = self.path.exists() and not (self._directory / MANIFEST_NAME).exists()
        occupied = next(self._set_files(), None)
        if occupied and not overwrite and not interrupted:
            raise ConfigurationError(
                f"{self._directory}/ already holds another shard set ({occupied.name}): "
                "pass --overwrite to replace it, or another folder with -o"
            )
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def _set_files(self) -> Iterator[Path]:
        """Yield what is in the folder of any set, the manifest first."""
        names = (MANIFEST_NAME, TOKENIZER_DIRECTORY)
        yield from (self._directory / name for name in names if (self._directory / name).exists())
        yield from self._directory.glob("rank-*-of-*.h5")

    def commit(self) -> None:
        """Put the finished set in the place of what was there."""
        names = [path.name for path in self.path.iterdir() if path.name != MANIFEST_NAME]
        stale = [path for path in self._set_files() if path.name not in names]
        try:
            self._switch(names, stale)
        except (StoppedError, KeyboardInterrupt):
            # A signal between two moves: go on where it struck, half a set helps nobody.
            self._switch(names, stale)
            raise

    def _switch(self, names: Sequence[str], stale: Sequence[Path]) -> None:
        staged_manifest = self.path / MANIFEST_NAME
        if staged_manifest.exists():
            for path in stale:
                _remove(path)
            sync_directory(self._directory)
            for name in names:
                if (self.path / name).exists():
                    _remove(self._directory / name)
                    (self.path / name).rename(self._directory / name)
            sync_directory(self._directory)
            staged_manifest.rename(self._directory / MANIFEST_NAME)
        shutil.rmtree(self.path, ignore_errors=True)
        sync_directory(self._directory)
        if self._created:
            sync_directory(self._directory.parent)

    def close(self) -> None:
        """Release the folder; what was not committed is removed, and what was there before stays as it is."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._created and not any(self._directory.iterdir()):
            self._directory.rmdir()
        os.close(self._lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileError(f"another sharder is writing to {directory}/: wait for it, or use another folder") from error
    except OSError:
        # Some cluster file systems have no locks; there, two writers at once are the user's to avoid.
        pass


def sync_directory(directory: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
