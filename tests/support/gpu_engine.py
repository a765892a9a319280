"""An engine on one device, as infer builds it, from whole tensors."""

import math
from collections.abc import Sequence

import torch

from mpi_tp.comm.single import SingleCommunicator
from mpi_tp.engine.device_runner import DeviceRunner
from mpi_tp.engine.engine import Outcome
from mpi_tp.engine.kv_cache import allocate_cache
from mpi_tp.kernels.gpu_kernels import GpuKernels
from mpi_tp.layers.context import LayerContext
from mpi_tp.models.causal_lm import CausalLM
from mpi_tp.models.families import parse_config, tensor_table
from mpi_tp.partition.plan import plan_shards
from tests.support.engines import Request, Setting, build_engine
from tests.support.tiny import hf_config, hf_weights


class GpuServer:
    """Serves requests, one lot after another, on a cache that is NaN where nothing was written."""

    def __init__(self, setting: Setting, device: torch.device, *, invariant: bool, uses_graphs: bool = True) -> None:
        hf, weights = hf_config(setting.model), hf_weights(setting.model)
        config = parse_config(hf)
        plan = plan_shards(tensor_table(hf), "column_wise", 1)
        comm = SingleCommunicator()
        comm.is_capturable = uses_graphs
        context = LayerContext(comm, GpuKernels(invariant), plan, device, lambda name: weights[name].to(device))
        caches = allocate_cache(config, setting.num_blocks + 1, 0, 1, setting.model.dtype, device)
        for part in (part for cache in caches for part in cache):
            part.fill_(math.nan)
        runner = DeviceRunner(
            CausalLM(context, config),
            caches,
            comm,
            device,
            max_batch_size=setting.max_batch_size,
            max_length=setting.context_length,
        )
        self.engine = build_engine(setting, comm, runner)

    def serve(self, requests: Sequence[Request]) -> list[Outcome]:
        """Return the outcomes in the order of the requests, which are served together."""
        for key, (prompt, params) in enumerate(requests):
            self.engine.submit(key, prompt, params)
        outcomes = {}
        while not self.engine.is_idle:
            outcomes.update((outcome.key, outcome) for outcome in self.engine.step())
        assert self.engine.blocks_in_use == 0
        return [outcomes[key] for key in range(len(requests))]
