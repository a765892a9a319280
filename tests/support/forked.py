"""A program of one process, run in a fork of the tests': what takes seconds to import is there already."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import BinaryIO, NoReturn

SECONDS = 120


def run_module(
    module: str, arguments: Sequence[object], prepare: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Do what `python -m module arguments` does; `prepare` is called in the new process before.

    A program that takes longer than two minutes is ended by SIGALRM.
    """
    command = [module, *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become(command, out, err, prepare)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


def _become(command: list[str], out: BinaryIO, err: BinaryIO, prepare: Callable[[], None] | None) -> NoReturn:
    code = 1
    try:
        signal.alarm(SECONDS)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = command
        if prepare:
            prepare()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the tests of the parent must not go on here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()
