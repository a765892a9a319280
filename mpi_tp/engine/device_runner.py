"""The forward pass and sampling on a GPU: a step is queued while the one before it still runs.

Steps in which every sequence decodes run as CUDA graphs; steps with prompts are queued kernel by kernel, which their
work hides. Tokens stay on the device: the next step takes them from there.
"""

from typing import Any

import torch
from numpy.typing import NDArray

from mpi_tp.comm.base import Communicator
from mpi_tp.engine.decode_graphs import DecodeGraphs, DecodeInputs, Shape, shape_for
from mpi_tp.engine.device_sampler import SamplingTensors, sample
from mpi_tp.engine.sampler import Sampled
from mpi_tp.engine.step import SamplingRows, StepPlan
from mpi_tp.kernels.base import Cache
from mpi_tp.kernels.gpu.attention import tokens_per_tile
from mpi_tp.kernels.gpu.tiles import TiledInputs, tile
from mpi_tp.kernels.gpu.tokens import resolve
from mpi_tp.models.causal_lm import CausalLM


class DeviceOutput:
    """A queued step's tokens, on their way to the host."""

    def __init__(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        self._tokens = _to_host(tokens)
        self._logprobs = None if logprobs is None else _to_host(logprobs)
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> Sampled:
        """Wait for the step and return its tokens."""
        self._done.synchronize()
        return Sampled(self._tokens.numpy(), None if self._logprobs is None else self._logprobs.numpy())


class DeviceRunner:
    """A model and its cache on this rank's GPU. The last block of the cache is for rows that fill up a graph."""

    steps_in_flight = 1

    def __init__(
        self,
        model: CausalLM,
        caches: list[Cache],
        comm: Communicator,
        device: torch.device,
        *,
        max_batch_size: int,
        max_length: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._comm = comm
        self._device = device
        self._tokens_per_tile = tokens_per_tile(model.layers[0].self_attn.heads)
        self.num_blocks = len(caches[0][0]) - 1
        largest = shape_for(min(max_batch_size, self.num_blocks), max_length, greedy=True)
        self._inputs = DecodeInputs(largest.rows, largest.length, self.num_blocks, device)
        self._graphs = DecodeGraphs(self._decode) if comm.is_capturable else None
        self._last_tokens = torch.zeros(largest.rows, dtype=torch.int64, device=device)
        self._logits = torch.empty(0, device=device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceOutput:
        """Queue the step and return its tokens to come."""
        if not len(plan.ids):
            return DeviceOutput(self._last_tokens[:0], None)
        greedy = plan.sampling is None
        if len(plan.ids) == len(plan.logit_rows) == len(plan.block_tables):
            shape = shape_for(len(plan.ids), int(plan.positions.max()) + 1, greedy)
            self._inputs.send(shape, plan.ids, plan.positions, plan.slots, plan.block_tables)
            result = (self._graphs.run(shape) if self._graphs else self._decode(shape))[: len(plan.ids)]
        else:
            result = self._finish(self._run_packed(plan), greedy)
        tokens, logprobs = (result, None) if plan.sampling is None else self._sample(result, plan.sampling)
        self._last_tokens[: len(tokens)] = tokens
        return DeviceOutput(tokens, logprobs)

    def _decode(self, shape: Shape) -> torch.Tensor:
        """Queue a step of one token a sequence: what a graph is captured from."""
        ids = resolve(self._inputs.ids(shape), self._last_tokens)
        result = self._finish(self._model(ids, self._inputs.attention_inputs(shape), self._caches), shape.greedy)
        return result if shape.greedy else self._keep(result)

    def _run_packed(self, plan: StepPlan) -> torch.Tensor:
        """Queue a step with prompts and return the hidden states [R, K] of its logit rows."""
        num_single, tiles = tile(plan.sequence_ids, self._tokens_per_tile)
        inputs = TiledInputs(
            positions=self._put(plan.positions).long(),
            sequence_ids=self._put(plan.sequence_ids).long(),
            block_tables=self._put(plan.block_tables),
            slots=self._put(plan.slots).long(),
            num_single=num_single,
            tiles=self._put(tiles),
            longest=int(plan.positions[:num_single].max(initial=0)) + 1,
        )
        ids = resolve(self._put(plan.ids).long(), self._last_tokens)
        return self._model(ids, inputs, self._caches, self._put(plan.logit_rows).long())

    def _finish(self, hidden: torch.Tensor, greedy: bool) -> torch.Tensor:
        """Return the likeliest tokens [R], or logits [R, V]."""
        return self._model.greedy_tokens(hidden) if greedy else self._model.logits(hidden)

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits [R, V] to the one place for the results of all graphs, which would keep one each."""
        if not self._logits.numel():
            self._logits = logits.new_empty(len(self._last_tokens), logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _sample(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, logprobs = sample(logits, self._sampling(rows))
        return self._comm.broadcast(tokens), logprobs

    def _sampling(self, rows: SamplingRows) -> SamplingTensors:
        return SamplingTensors(
            temperature=self._put(rows.temperature),
            top_k=self._put(rows.top_k),
            top_p=self._put(rows.top_p),
            uniform=self._put(rows.uniform),
            filters=bool((rows.top_k > 0).any() or (rows.top_p < 1).any()),
            logprobs=rows.logprobs,
        )

    def _put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to pinned memory: only there is it no wait."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
