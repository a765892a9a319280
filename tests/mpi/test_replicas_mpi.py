"""Replicas over real ranks: who belongs together, and mail that nobody waits for."""

import time
from typing import Any

import pytest
from mpi4py import MPI

from mpi_tp.comm.mail import MpiMail
from mpi_tp.replicas import divide

WORLD = MPI.COMM_WORLD
several_ranks = pytest.mark.skipif(WORLD.size == 1, reason="nobody to write to: start under mpirun -np 2")


@pytest.fixture
def mail() -> MpiMail:
    return MpiMail(WORLD.Dup())


@pytest.mark.parametrize("ranks", [n for n in range(1, WORLD.size + 1) if WORLD.size % n == 0])
def test_consecutive_ranks_are_a_replica(ranks: int) -> None:
    replicas = divide(WORLD, ranks)
    assert (replicas.count, replicas.index) == (WORLD.size // ranks, WORLD.rank // ranks)
    first = replicas.index * ranks
    assert replicas.ranks.allgather(WORLD.rank) == list(range(first, first + ranks))
    is_first_of_several = replicas.ranks.rank == 0 and replicas.count > 1
    assert (replicas.mail is not None) == is_first_of_several
    if replicas.mail:
        assert (replicas.mail.rank, replicas.mail.size) == (replicas.index, replicas.count)


def receive(mail: MpiMail, count: int) -> list[tuple[int, Any]]:
    received: list[tuple[int, Any]] = []
    while len(received) < count:
        received += mail.receive(1.0)
    assert len(received) == count
    return received


@pytest.mark.parametrize("size", [0, 100, 3_000_000])
def test_all_write_to_all_and_nobody_waits(mail: MpiMail, size: int) -> None:
    """Large ones too, which MPI does not buffer; in the order in which each was sent."""
    for number in range(4):
        for other in range(mail.size):
            mail.send((number, bytes([mail.rank]) * (size if number % 2 else 1)), other)
    by_source: dict[int, list[tuple[int, bytes]]] = {source: [] for source in range(mail.size)}
    for source, value in receive(mail, 4 * mail.size):
        by_source[source].append(value)
    for source, values in by_source.items():
        assert values == [(number, bytes([source]) * (size if number % 2 else 1)) for number in range(4)]
    assert mail.receive() == []


def test_waiting_for_mail_sleeps(mail: MpiMail) -> None:
    before = time.process_time()
    assert mail.receive(0.5) == []
    assert time.process_time() - before < 0.25


@several_ranks
def test_a_large_message_does_not_hold_up_who_looks_for_it(mail: MpiMail) -> None:
    """Its sender calls MPI again only when it is told; who receives asks now and then."""
    if mail.rank == 1:
        mail.send(bytes(30_000_000), 0)
        receive(mail, 1)  # the sign
        WORLD.Barrier()
    elif mail.rank == 0:
        early = mail.receive()  # returns, whether the message is whole or not
        mail.send("go on", 1)
        [(source, value)] = early or receive(mail, 1)
        assert (source, len(value)) == (1, 30_000_000)
        WORLD.Barrier()
    else:
        WORLD.Barrier()
