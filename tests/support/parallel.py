"""A model split over ranks that are threads of this process, straight from its whole tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpi_tp.comm.base import Communicator
from mpi_tp.engine.kv_cache import BLOCK_SIZE, allocate_cache, blocks_for
from mpi_tp.engine.request import SamplingParams
from mpi_tp.engine.runner import HostRunner
from mpi_tp.engine.sequence import Chunk, Sequence
from mpi_tp.engine.step import plan_step
from mpi_tp.kernels.base import Kernels
from mpi_tp.layers.context import LayerContext
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.partition.plan import PlannedTensor, Strategy, plan_shards

CPU = torch.device("cpu")


def slice_for(planned: PlannedTensor, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return rank `rank`'s part of a whole tensor."""
    if planned.axis is None:
        return tensor
    parts = [tensor.narrow(planned.axis, start, stop - start) for start, stop in planned.ranges[rank]]
    return torch.cat(parts or [tensor.narrow(planned.axis, 0, 0)], dim=planned.axis).contiguous()


def layer_context(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    comm: Communicator,
    kernels: Kernels,
    strategy: Strategy,
) -> LayerContext:
    """Return what the layers of rank `comm.rank` are built from."""
    plan = plan_shards(tensor_table(config), strategy, comm.size)
    return LayerContext(comm, kernels, plan, CPU, lambda name: slice_for(plan[name], weights[name], comm.rank))


def all_logits(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    comm: Communicator,
    kernels: Kernels,
    strategy: Strategy,
    prompts: list[list[int]],
    chunk: int,
) -> list[torch.Tensor]:
    """Return the logits [length, vocabulary] at every position of each prompt, run `chunk` tokens of each a step."""
    parsed = parse_config(config)
    model = CausalLM(layer_context(config, weights, comm, kernels, strategy), parsed)
    sequences, next_block = [], 0
    for prompt in prompts:
        sequence = Sequence(SamplingParams(), 0, prompt, len(prompt), len(prompt))
        sequence.blocks = np.arange(next_block, next_block + blocks_for(len(prompt)), dtype=np.int32)[::-1]
        next_block += len(sequence.blocks)
        sequences.append(sequence)
    dtype = kernels.activation_dtype or next(iter(weights.values())).dtype
    runner = HostRunner(model, allocate_cache(parsed, next_block, comm.rank, comm.size, dtype, CPU))
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        chunks = [
            (index, Chunk(sequence, start, min(start + chunk, len(sequence.tokens)), False))
            for index, sequence in enumerate(sequences)
            if start < len(sequence.tokens)
        ]
        plan = plan_step([one for _, one in chunks], BLOCK_SIZE)
        logits = model.logits(runner.forward(dataclasses.replace(plan, logit_rows=np.arange(len(plan.ids)))))
        for (index, _), part in zip(chunks, logits.split([c.stop - c.start for _, c in chunks]), strict=True):
            rows[index].append(part)
    return [torch.cat(parts) for parts in rows]
