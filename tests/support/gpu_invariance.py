"""The promise of the GPU's invariant kernels, bit for bit, checked on any device."""

from collections.abc import Callable, Iterable

import torch

from mpi_tp.kernels.base import AttentionInputs
from mpi_tp.kernels.gpu_kernels import GpuKernels
from tests.support.gpu_checks import randoms, uneven_heads
from tests.support.paged_sequences import PagedSequences

Rows = Callable[[torch.Tensor], torch.Tensor]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits agree, those of zeros and NaNs too."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_rows(operation: Rows, x: torch.Tensor, counts: Iterable[int]) -> None:
    """Check that each row of x gives what it gives alone, among the first `counts` rows in another order."""
    alone = torch.cat([operation(row) for row in x.split(1)])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    for count in counts:
        assert same_bits(operation(x[order[:count]]), alone[order[:count]]), count


def check_linear_columns(
    kernels: GpuKernels, x: torch.Tensor, weight: torch.Tensor, cuts: Iterable[tuple[int, int]], counts: Iterable[int]
) -> None:
    """Check that ranks which hold rows `cuts` of the weight compute the columns of the whole product."""
    for count in counts:
        whole = kernels.linear(x[:count], kernels.prepare(weight))
        for start, stop in cuts:
            part = kernels.linear(x[:count], kernels.prepare(weight[start:stop]))
            assert same_bits(part, whole[:, start:stop]), (count, start, stop)


def check_gated_columns(
    kernels: GpuKernels,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    cuts: Iterable[tuple[int, int]],
    counts: Iterable[int],
) -> None:
    """The same for gate and up."""
    for count in counts:
        whole = kernels.gated_linear(x[:count], kernels.prepare_gated(*weights))
        for start, stop in cuts:
            part = kernels.gated_linear(x[:count], kernels.prepare_gated(*(w[start:stop] for w in weights)))
            assert same_bits(part, whole[:, start:stop]), (count, start, stop)


def check_rotation_rows(
    kernels: GpuKernels, device: torch.device, dtype: torch.dtype, groups: tuple[int, ...], width: int, normed: bool
) -> None:
    """Check queries and what is stored of 40 tokens, alone and in another order."""
    size = width * (sum(groups) + 2 * len(groups))
    qkv, angles, *norms = randoms(device, dtype, (40, size), (40, width), (width,), (width,))
    rotation = angles.float().cos(), angles.float().sin()
    heads = uneven_heads(groups, width, device, tuple(norms) if normed else ())

    def run(rows: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values [T, H + 2G, D] of the tokens named in `rows`."""
        cache = tuple(torch.zeros(3, 16, len(groups), width, dtype=dtype, device=device) for _ in range(2))
        inputs = AttentionInputs(rows, rows, rows, slots=rows)
        q = kernels.rotate_and_store(qkv[rows], heads, tuple(part[rows] for part in rotation), cache, inputs)
        stored = [part.view(3, len(groups), 16, width).transpose(1, 2).flatten(0, 1)[rows] for part in cache]
        return torch.cat((q, *stored), dim=1)

    check_rows(run, torch.arange(40, device=device), (1, 2, 7, 40))


def check_attention(kernels: GpuKernels, sequences: PagedSequences, window: int | None) -> None:
    """Check every schedule, and a rank that holds some of the heads."""
    schedules = sequences.schedules()
    alone = sequences.run(kernels.attention, schedules.pop("one by one"), window)
    assert not any(result.isnan().any() for result in alone)
    for name, steps in schedules.items():
        for result, expected in zip(sequences.run(kernels.attention, steps, window), alone, strict=True):
            assert same_bits(result, expected), name
    num_heads = sequences.heads.num_heads
    for start, stop in ((0, 1), (1, num_heads), (num_heads // 2, num_heads // 2 + 2)):
        part = sequences.some_heads(start, stop)
        for steps in (schedules["chunks"], schedules["together"]):
            for result, expected in zip(part.run(kernels.attention, steps, window), alone, strict=True):
                assert same_bits(result, expected[:, start:stop]), (start, stop)
