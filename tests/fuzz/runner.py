"""Fuzzing in processes of their own, so that a crash or a stall is an outcome too."""

import multiprocessing
import resource
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.fuzz.kinds import SUBJECTS

START_SECONDS = 900
"""Imports and the sound files, on a machine that does much else."""
STALL_SECONDS = 120
MEMORY_BYTES = 12 << 30
"""Address space of the process that reads: what would need more is a finding."""


def fuzz(kind: str, seed: int, count: int, folder: Path) -> int:
    """Fuzz one kind in processes of its own, print the outcomes, and return how many findings there were."""
    outcomes: Counter[str] = Counter()
    findings = done = 0
    while done < count:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_work, args=(kind, seed, done, count, folder / kind, sender)
        )
        process.start()
        sender.close()
        done, found = _collect(receiver, done, count, outcomes, kind)
        findings += found
        process.kill()
        process.join()
    table = ", ".join(f"{name} {number}" for name, number in sorted(outcomes.items()))
    print(f"{kind:12} {count:6} inputs: {table}", flush=True)
    return findings


def _collect(receiver: Connection, first: int, count: int, outcomes: Counter[str], kind: str) -> tuple[int, int]:
    """Take what a process reports until it ends, crashes or stalls; return the next index and the findings."""
    findings = 0
    receiver.poll(START_SECONDS)
    for index in range(first, count):
        try:
            outcome, report = receiver.recv() if receiver.poll(STALL_SECONDS) else ("STALL", "")
        except EOFError:
            outcome, report = "CRASH", ""
        outcomes[outcome] += 1
        if outcome.isupper():
            findings += 1
            print(f"{outcome} {kind} --only {index}: {report}", flush=True)
        if outcome in ("STALL", "CRASH"):
            return index + 1, findings
    return count, findings


def _work(kind: str, seed: int, first: int, count: int, folder: Path, sender: Connection) -> None:
    """Report every input's outcome."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    subject = SUBJECTS[kind](folder / "base", folder / "scratch")
    for index in range(first, count):
        try:
            sender.send((subject.outcome(seed, index), ""))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            sender.send(("FINDING", f"{type(error).__name__}: {str(error)[:300]!r} at {where.filename}:{where.lineno}"))
