"""What every communicator must do. Each check takes a communicator and a device, and runs on all its ranks.

All ranks can compute what any rank holds (`held_by`), so that each compares with plain torch. The values are multiples
of 1/64 whose sums are exact in float32: every comparison is for equality.
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mpi_tp.comm.base import Communicator

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
MOVED = (*SUMMED, torch.bool, torch.uint8)


def held_by(rank: int, shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the tensor of `shape` that `rank` holds; different on every rank."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    values = torch.randint(-127, 128, shape, generator=generator)
    if dtype.is_floating_point:
        return (values / 64).to(dtype).to(device)
    return (values % 2 == 0 if dtype == torch.bool else values).to(dtype).to(device)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum, rounded once to the tensors' type."""
    wide = torch.float64 if tensors[0].is_floating_point() else torch.int64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).to(tensors[0].dtype)


def splits(size: int) -> list[list[int]]:
    """Return sizes for every rank: even, of one element, uneven, with empty ranks, all empty."""
    uneven = [5 + rank % 3 for rank in range(size)]
    some_empty = [4 * (rank % 2) for rank in range(size)]
    return [[3] * size, [1] * size, uneven, some_empty, [7] + [0] * (size - 1), [0] * size]


def shapes(size_along: int) -> Iterator[tuple[list[int], int]]:
    """Yield shapes with `size_along` along a dim, and the dim: one token, a batch, a batch of sequences."""
    yield [1, size_along], -1
    yield [2, size_along], -1
    yield [size_along], 0
    yield [size_along, 3], 0
    yield [2, size_along, 3], 1
    yield [2, 3, size_along], -1


def all_reduce_sums_in_place(comm: Communicator, device: torch.device) -> None:
    for dtype in SUMMED:
        for shape in ([2, 5], [1], [3, 4, 2], [0], [2, 0], [513]):
            tensor = held_by(comm.rank, shape, dtype, device)
            result = comm.all_reduce(tensor)
            assert result is tensor
            assert torch.equal(result, sum_of([held_by(r, shape, dtype, device) for r in range(comm.size)]))


def all_gather_concatenates(comm: Communicator, device: torch.device) -> None:
    for dtype in MOVED:
        for sizes in splits(comm.size):
            for of_ranks in zip(*(shapes(size) for size in sizes), strict=True):
                dim = of_ranks[0][1]
                held = [held_by(r, shape, dtype, device) for r, (shape, _) in enumerate(of_ranks)]
                result = comm.all_gather(held[comm.rank], sizes, dim)
                assert torch.equal(result, torch.cat(held, dim)), f"{dtype}, sizes {sizes}, dim {dim}"
                assert result.is_contiguous()
                assert result.dtype == dtype
                assert comm.size == 1 or not result.numel() or result.data_ptr() != held[comm.rank].data_ptr()


def all_gather_takes_the_last_dim(comm: Communicator, device: torch.device) -> None:
    held = [held_by(r, [2, r + 1], torch.float32, device) for r in range(comm.size)]
    result = comm.all_gather(held[comm.rank], [r + 1 for r in range(comm.size)])
    assert torch.equal(result, torch.cat(held, -1))


def reduce_scatter_sums_blocks(comm: Communicator, device: torch.device) -> None:
    for dtype in SUMMED:
        for sizes in splits(comm.size):
            for shape, dim in shapes(sum(sizes)):
                held = [held_by(r, shape, dtype, device) for r in range(comm.size)]
                tensor = held[comm.rank].clone()
                result = comm.reduce_scatter(tensor, sizes, dim)
                assert torch.equal(result, sum_of(held).split(sizes, dim)[comm.rank]), f"{dtype}, {sizes}, {dim}"
                assert result.is_contiguous()
                assert result.dtype == dtype
                assert torch.equal(tensor, held[comm.rank])


def broadcast_overwrites(comm: Communicator, device: torch.device) -> None:
    for dtype in MOVED:
        for root in range(comm.size):
            for shape in ([2, 5], [0], [1]):
                tensor = held_by(comm.rank, shape, dtype, device)
                result = comm.broadcast(tensor, root)
                assert result is tensor
                assert torch.equal(result, held_by(root, shape, dtype, device))


def messages_go_round_a_ring(comm: Communicator, device: torch.device) -> None:
    """Each rank passes on what it gets; rank 0 gets its own back. Rank 0 sends first: messages need not be buffered."""
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in MOVED:
        for shape in ([2, 5], [0], [70_000]):
            sent = held_by(0, shape, dtype, device)
            landing = torch.zeros_like(sent)
            if comm.rank == 0:
                comm.send(sent, after)
            result = comm.recv(landing, before)
            if comm.rank != 0:
                comm.send(result, after)
            assert result is landing
            assert torch.equal(result, sent)


def neighbours_exchange_messages(comm: Communicator, device: torch.device) -> None:
    """Messages of several senders, and several of one sender, are not mixed up."""
    for other in range(comm.size):
        if other == comm.rank:
            continue
        for turn in sorted((comm.rank, other)):
            for shape in ([3], [2, 2]):
                if turn == comm.rank:
                    comm.send(held_by(comm.rank, shape, torch.float32, device), other)
                else:
                    result = comm.recv(torch.zeros(shape, device=device), other)
                    assert torch.equal(result, held_by(other, shape, torch.float32, device))


def objects_reach_everyone(comm: Communicator, device: torch.device) -> None:
    for root in range(comm.size):
        assert comm.bcast_object({"rank": comm.rank, "text": "ü" * root}, root) == {"rank": root, "text": "ü" * root}
    assert comm.bcast_object(None if comm.rank else [1, 2]) == [1, 2]
    assert comm.all_gather_object((comm.rank, "x")) == [(rank, "x") for rank in range(comm.size)]


def barrier_holds_everyone(comm: Communicator, device: torch.device) -> None:
    """No rank leaves before the last has come (the clock is the host's: for ranks of one host)."""
    time.sleep(0.02 * comm.rank)
    came = time.monotonic()
    comm.barrier()
    left = time.monotonic()
    times = comm.all_gather_object((came, left))
    assert max(came for came, _ in times) <= min(left for _, left in times)


def results_outlive_later_calls(comm: Communicator, device: torch.device) -> None:
    """A result is the caller's: no later collective changes it, nor reuse of the argument unless it is the result."""
    sizes = [2] * comm.size
    results = []
    tensor = torch.empty(2, 2, device=device)
    for turn in range(4):
        tensor.fill_(10 * turn + comm.rank)
        results.append(comm.all_gather(tensor.clone() if comm.size == 1 else tensor, sizes))
    tensor.fill_(-1)
    comm.barrier()
    for turn, result in enumerate(results):
        expected = [[10.0 * turn + r for r in range(comm.size) for _ in range(2)]] * 2
        assert result.tolist() == expected


def strided_tensors_are_refused(comm: Communicator, device: torch.device) -> None:
    strided = torch.zeros(4, 3, device=device).t()
    with pytest.raises(AssertionError, match="contiguous"):
        comm.all_reduce(strided)
    with pytest.raises(AssertionError, match="contiguous"):
        comm.all_gather(strided, [4] * comm.size)
    with pytest.raises(AssertionError, match="contiguous"):
        comm.broadcast(strided)


def wrong_sizes_are_refused(comm: Communicator, device: torch.device) -> None:
    tensor = torch.zeros(2, 3, device=device)
    with pytest.raises(AssertionError, match="sizes"):
        comm.all_gather(tensor, [2] * comm.size)
    with pytest.raises(AssertionError, match="sizes"):
        comm.reduce_scatter(tensor, [4] * comm.size)


CHECKS: list[Callable[[Communicator, torch.device], None]] = [
    all_reduce_sums_in_place,
    all_gather_concatenates,
    all_gather_takes_the_last_dim,
    reduce_scatter_sums_blocks,
    broadcast_overwrites,
    messages_go_round_a_ring,
    neighbours_exchange_messages,
    objects_reach_everyone,
    barrier_holds_everyone,
    results_outlive_later_calls,
    strided_tensors_are_refused,
    wrong_sizes_are_refused,
]
