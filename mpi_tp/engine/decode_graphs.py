"""Decode steps as CUDA graphs: one launch a step instead of hundreds.

A graph has a fixed shape: rows (sequences, rounded up) and the longest sequence (rounded up). It is captured when its
shape comes up for the first time, in a few hundredths of a second, after that step itself has run without it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpi_tp.engine.kv_cache import BLOCK_SIZE
from mpi_tp.kernels.gpu.tiles import TiledInputs

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the graphs; beyond, in steps of 256."""
SHORTEST = 256
"""Tokens of the longest sequence of the smallest graph; the others have twice, four times … as many."""

IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, order=True)
class Shape:
    """What a graph is captured for; `greedy` graphs end with tokens, the others with logits."""

    rows: int
    length: int
    greedy: bool


def shape_for(num_rows: int, longest: int, greedy: bool) -> Shape:
    """Return the shape that holds `num_rows` sequences of up to `longest` tokens."""
    rows = next((bucket for bucket in BUCKETS if bucket >= num_rows), -(-num_rows // 256) * 256)
    length = SHORTEST << (-(-longest // SHORTEST) - 1).bit_length()
    return Shape(rows, length, greedy)


class HostSide:
    """Pinned memory from which one step's inputs are sent, and the moment at which it may be written again."""

    def __init__(self, packed: torch.Tensor, tables: torch.Tensor) -> None:
        self.packed = torch.zeros_like(packed, device="cpu").pin_memory()
        self.tables = torch.zeros_like(tables, device="cpu").pin_memory()
        self.sent = torch.cuda.Event()


class DecodeInputs:
    """The inputs of decode steps where the graphs read them.

    Rows that a step does not fill run token 0 at position 0 of the block `spare`, which belongs to no sequence.
    """

    def __init__(self, max_rows: int, max_length: int, spare: int, device: torch.device) -> None:
        self._spare = spare
        self._packed = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_rows * (max_length // BLOCK_SIZE), dtype=torch.int32, device=device)
        self._no_tiles = torch.zeros(0, 3, dtype=torch.int32, device=device)
        self._sequence_ids = torch.arange(max_rows, device=device)
        self._sides = itertools.cycle([HostSide(self._packed, self._tables) for _ in range(2)])

    def send(self, shape: Shape, ids: IntArray, positions: IntArray, slots: IntArray, block_tables: IntArray) -> None:
        """Queue the copies of a step's inputs: ids, positions, slots [rows] and tables [rows, blocks]."""
        side = next(self._sides)
        side.sent.synchronize()
        count, width = len(ids), shape.length // BLOCK_SIZE
        packed = side.packed.numpy()
        packed[:, :count] = ids, positions, slots
        packed[:, count : shape.rows] = [[0], [0], [self._spare * BLOCK_SIZE]]
        size, columns = shape.rows * width, min(width, block_tables.shape[1])
        tables = side.tables.numpy()[:size].reshape(shape.rows, width)
        tables[:count, :columns] = block_tables[:, :columns]
        tables[count:, 0] = self._spare
        self._packed.copy_(side.packed, non_blocking=True)
        self._tables[:size].copy_(side.tables[:size], non_blocking=True)
        side.sent.record()

    def ids(self, shape: Shape) -> torch.Tensor:
        """Return the token ids [rows]."""
        return self._packed[0, : shape.rows]

    def attention_inputs(self, shape: Shape) -> TiledInputs:
        """Return where the tokens stand."""
        width = shape.length // BLOCK_SIZE
        return TiledInputs(
            positions=self._packed[1, : shape.rows],
            sequence_ids=self._sequence_ids[: shape.rows],
            block_tables=self._tables[: shape.rows * width].view(shape.rows, width),
            slots=self._packed[2, : shape.rows],
            num_single=shape.rows,
            tiles=self._no_tiles,
            longest=shape.length,
        )


class DecodeGraphs:
    """The captured steps, by shape. `step(shape)` queues a step's kernels and returns its result."""

    def __init__(self, step: Callable[[Shape], torch.Tensor]) -> None:
        self._step = step
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, shape: Shape) -> torch.Tensor:
        """Queue the step on the current stream and return its result, which the next step overwrites."""
        if shape not in self._captured:
            result = self._step(shape)
            self._captured[shape] = self._capture(shape)
            return result
        graph, result = self._captured[shape]
        graph.replay()
        return result

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, a watchdog say, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._step(shape)
        return graph, result
