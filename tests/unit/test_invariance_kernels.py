"""The promise of the invariant kernels, bit for bit: a row's result depends on that row and the weights alone."""

import math
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpi_tp.kernels import select
from mpi_tp.kernels.base import AttentionHeads, AttentionInputs
from tests.unit.test_kernels import store

KERNELS = select(torch.device("cpu"), "invariant", torch.bfloat16)
BATCHES = (1, 2, 3, 5, 8, 16, 33)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return KERNELS.linear(x, KERNELS.prepare(weight))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits agree, those of zeros and NaNs too."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@DTYPES
@pytest.mark.parametrize("inputs", [1, 3, 64, 100, 576, 1536])
def test_linear_row_alone_and_in_any_batch(inputs, dtype):
    rng = np.random.default_rng(inputs)
    weight = KERNELS.prepare(random(rng, 83, inputs).to(dtype))
    x = random(rng, max(BATCHES), inputs)
    alone = torch.cat([KERNELS.linear(row[None], weight) for row in x])
    for tokens in BATCHES:
        assert same(KERNELS.linear(x[:tokens], weight), alone[:tokens])
        order = torch.from_numpy(rng.permutation(len(x))[:tokens])
        assert same(KERNELS.linear(x[order], weight), alone[order])


@DTYPES
@pytest.mark.parametrize("inputs", [1, 3, 64, 100, 576, 1536])
def test_linear_over_any_slice_of_columns(inputs, dtype):
    rng = np.random.default_rng(inputs)
    weight = random(rng, 130, inputs).to(dtype)
    for tokens in BATCHES:
        x = random(rng, tokens, inputs)
        whole = linear(x, weight)
        for width in (1, 2, 3, 7, 16, 50):
            start = int(rng.integers(0, 130 - width))
            assert same(linear(x, weight[start : start + width]), whole[:, start : start + width])


@pytest.mark.parametrize("seed", range(20))
def test_linear_at_random_shapes(seed):
    rng = np.random.default_rng(seed)
    tokens, inputs, outputs = (int(rng.integers(1, high)) for high in (40, 700, 200))
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    weight, x, bias = random(rng, outputs, inputs).to(dtype), random(rng, tokens, inputs), random(rng, outputs)
    whole = KERNELS.linear(x, KERNELS.prepare(weight), bias)
    cuts = np.sort(rng.integers(0, outputs + 1, 3))
    ranges = list(zip((0, *cuts), (*cuts, outputs), strict=True))
    for rows in np.array_split(rng.permutation(tokens), 3):
        parts = [KERNELS.linear(x[rows], KERNELS.prepare(weight[a:b]), bias[a:b]) for a, b in ranges]
        assert same(torch.cat(parts, dim=1), whole[rows])


def test_linear_keeps_a_bad_row_to_itself():
    rng = np.random.default_rng(1)
    weight, x = KERNELS.prepare(random(rng, 40, 70)), random(rng, 9, 70)
    bad = x.clone()
    bad[4, 3], bad[6, 69] = math.nan, math.inf
    good = [0, 1, 2, 3, 5, 7, 8]
    assert same(KERNELS.linear(bad, weight)[good], KERNELS.linear(x, weight)[good])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "relu", "gelu", "silu", "tanh"])
def test_rows_alone_and_in_any_batch(name):
    rng = np.random.default_rng(3)
    operations = {
        "rms_norm": lambda x: KERNELS.rms_norm(x, torch.linspace(0.5, 2, x.shape[1]), 1e-6),
        "add_rms_norm": lambda x: torch.cat(
            KERNELS.add_rms_norm(x.clone(), x.roll(1, 1), torch.full(x.shape[1:], 2.0), 1e-6), 1
        ),
    }
    operation = operations.get(name, lambda x: KERNELS.activation(x, name))
    for width in (1, 3, 16, 17, 100, 1000, *rng.integers(1, 400, 5)):
        x = random(rng, max(BATCHES), width) * 10
        alone = torch.cat([operation(row[None]) for row in x])
        for tokens in BATCHES:
            order = torch.from_numpy(rng.permutation(len(x))[:tokens])
            assert same(operation(x[order]), alone[order])


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh"])
def test_elements_wherever_they_stand(name):
    x = random(np.random.default_rng(4), 300) * 10
    whole = KERNELS.activation(x, name)
    for start in range(0, 40):
        assert same(KERNELS.activation(x[start:], name), whole[start:])


@DTYPES
def test_gated_linear_row_alone_in_any_batch_and_over_any_slice(dtype):
    rng = np.random.default_rng(6)
    gate, up, x = random(rng, 130, 300).to(dtype), random(rng, 130, 300).to(dtype), random(rng, max(BATCHES), 300) / 4
    whole = torch.cat([KERNELS.gated_linear(row[None], KERNELS.prepare_gated(gate, up)) for row in x])
    for tokens in BATCHES:
        order = torch.from_numpy(rng.permutation(len(x))[:tokens])
        for width in (1, 16, 50, 130):
            own = slice(start := int(rng.integers(0, 131 - width)), start + width)
            part = KERNELS.gated_linear(x[order], KERNELS.prepare_gated(gate[own], up[own]))
            assert same(part, whole[order][:, own])


@pytest.mark.parametrize("normed", [False, True])
def test_rotation_with_any_neighbours_and_heads(normed):
    rng = np.random.default_rng(5)
    norms = {"q_norm": random(rng, 24), "k_norm": random(rng, 24), "norm_eps": 1e-5} if normed else {}
    qkv, cos, sin = random(rng, 33, 9 * 24), random(rng, 33, 24), random(rng, 33, 24)
    slots, nothing = torch.arange(33), torch.zeros(33, dtype=torch.int64)

    def run(order: torch.Tensor, first: int, last: int):
        """Return the cache and query heads first … last - 1 of 5 for some of the rows."""
        heads = AttentionHeads(torch.arange(last - first) // 3, 2, 24, **norms)
        x = torch.cat((qkv[order, first * 24 : last * 24], qkv[order, 5 * 24 :]), dim=1)
        cache = torch.zeros(3, 16, 2, 24), torch.zeros(3, 16, 2, 24)
        inputs = AttentionInputs(nothing, nothing, torch.zeros(1, 1, dtype=torch.int32), slots[order])
        return cache, KERNELS.rotate_and_store(x, heads, (cos[order], sin[order]), cache, inputs)

    whole_cache, whole = run(torch.arange(33), 0, 5)
    assert same(run(torch.arange(33), 2, 4)[1], whole[:, 2:4])
    for tokens in BATCHES:
        order = torch.from_numpy(rng.permutation(33)[:tokens])
        cache, part = run(order, 0, 5)
        assert same(part, whole[order])
        for stored, expected in zip(cache, whole_cache, strict=True):
            assert same(stored, torch.where(stored == 0, stored, expected))
            assert (stored != 0).sum() == tokens * 2 * 24


class Paged:
    """Sequences of random lengths, their keys and values, and a cache that is NaN where nothing was written."""

    def __init__(self, rng: np.random.Generator, heads: int, kv_heads: int, width: int, block_size: int) -> None:
        self.rng, self.block_size = rng, block_size
        self.lengths = [int(n) for n in rng.integers(1, 90, 5)]
        self.q = [random(rng, n, heads, width) for n in self.lengths]
        self.k, self.v = ([random(rng, n, kv_heads, width) for n in self.lengths] for _ in range(2))
        self.kv_index = torch.arange(heads) * kv_heads // heads
        self.kv_heads, self.width = kv_heads, width

    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.kv_index, self.kv_heads, self.width)

    def run(self, chunks: list[list[tuple[int, int, int]]], window: int | None) -> list[torch.Tensor]:
        """Run steps, each a list of (sequence, first, end), on a fresh cache; return the results by sequence."""
        needed = [-(-n // self.block_size) for n in self.lengths]
        blocks = iter(self.rng.permutation(sum(needed) + 5))
        tables = np.zeros((len(needed), max(needed) + int(self.rng.integers(0, 3))), np.int32)
        for row, count in enumerate(needed):
            tables[row, :count] = [next(blocks) for _ in range(count)]
        shape = (sum(needed) + 5, self.block_size, *self.k[0].shape[1:])
        cache = torch.full(shape, math.nan), torch.full(shape, math.nan)
        results = [torch.full_like(q, math.nan) for q in self.q]
        for step in chunks:
            self._step(step, tables, cache, window, results)
        return results

    def _step(self, step, tables, cache, window, results):
        used = [sequence for sequence, _, _ in step]
        positions = np.concatenate([np.arange(a, b) for _, a, b in step])
        ids = np.repeat(np.arange(len(step)), [b - a for _, a, b in step])
        slots = tables[used][ids, positions // self.block_size].astype(np.int64) * self.block_size
        inputs = AttentionInputs(
            *map(torch.from_numpy, (positions, ids, tables[used], slots + positions % self.block_size))
        )
        k, v, q = (torch.cat([whole[s][a:b] for s, a, b in step]) for whole in (self.k, self.v, self.q))
        store(KERNELS, k, v, cache, inputs)
        y = KERNELS.attention(q, cache, self.heads(), inputs, window)
        for (s, a, b), part in zip(step, y.split([b - a for _, a, b in step]), strict=True):
            results[s][a:b] = part

    def schedules(self) -> dict[str, list[list[tuple[int, int, int]]]]:
        whole = [(s, 0, n) for s, n in enumerate(self.lengths)]
        mixed, done = [], [0] * len(whole)
        while any(done[s] < n for s, _, n in whole):
            step = []
            for s, _, n in whole:
                if done[s] < n and self.rng.random() < 0.8:
                    end = min(n, done[s] + int(self.rng.integers(1, 30)))
                    step.append((s, done[s], end))
                    done[s] = end
            mixed += [step] if step else []
        return {
            "together": [whole],
            "one by one": [[sequence] for sequence in whole],
            "other order": [whole[::-1]],
            "token by token": [[(s, i, i + 1) for s, _, n in whole if i < n] for i in range(max(self.lengths))],
            "random chunks": mixed,
        }


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"),
    [(9, 3, 64, 16), (4, 4, 16, 32), (5, 2, 80, 16), (3, 1, 6, 16), (4, 2, 32, 5)],
)
def test_attention_in_any_company_schedule_and_place(window, heads, kv_heads, width, block_size):
    paged = Paged(np.random.default_rng(heads * width), heads, kv_heads, width, block_size)
    schedules = paged.schedules()
    expected = paged.run(schedules.pop("one by one"), window)
    assert not any(result.isnan().any() for result in expected)
    for name, schedule in schedules.items():
        for result, alone in zip(paged.run(schedule, window), expected, strict=True):
            assert same(result, alone), name


def test_attention_over_some_of_the_heads():
    paged = Paged(np.random.default_rng(1), 9, 3, 64, 16)
    schedule = paged.schedules()["together"]
    whole = paged.run(schedule, None)
    paged.q, paged.kv_index = [q[:, 2:5] for q in paged.q], paged.kv_index[2:5]
    for part, result in zip(paged.run(schedule, None), whole, strict=True):
        assert same(part, result[:, 2:5])


def test_attention_keeps_a_bad_sequence_to_itself():
    paged = Paged(np.random.default_rng(2), 4, 2, 32, 16)
    schedule = paged.schedules()["together"]
    clean = paged.run(schedule, None)
    paged.v[1][0], paged.k[2][0] = math.inf, math.nan
    results = paged.run(schedule, None)
    for sequence in (0, 3, 4):
        assert same(results[sequence], clean[sequence])
    assert results[2].isnan().all()


PROGRAM = """
import torch
from mpi_tp.kernels import select
kernels = select(torch.device("cpu"), "auto", torch.float32)
x = torch.linspace(-3, 3, 5 * 70).view(5, 70)
weight = kernels.prepare(x.T.contiguous()[:33].repeat(1, 14))
y = kernels.activation(kernels.linear(kernels.rms_norm(x, x[0], 1e-5), weight), "silu")
print(y.numpy().tobytes().hex())
"""


def start(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    variables.pop("NUMBA_CACHE_DIR", None)
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=variables, stdout=subprocess.PIPE, text=True)


def outputs(*processes: "subprocess.Popen[str]") -> set[str]:
    results = {process.communicate(timeout=120)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    return results


def copy_package(target: Path) -> Path:
    shutil.copytree(
        Path(__file__).parents[2] / "mpi_tp", target / "mpi_tp", ignore=shutil.ignore_patterns("__pycache__")
    )
    return target


def test_ranks_that_compile_at_the_same_moment_agree(tmp_path):
    folder = copy_package(tmp_path)
    cache = str(tmp_path / "cache")
    first = outputs(*(start(folder, XDG_CACHE_HOME=cache) for _ in range(3)))
    assert len(first) == 1
    assert list((tmp_path / "cache").rglob("*.nbc"))
    assert outputs(start(folder, XDG_CACHE_HOME=cache)) == first


def test_compiles_where_nothing_is_writable(tmp_path):
    folder = copy_package(tmp_path / "source")
    # A file stands where the folder would be made: this holds for root too, whom no mode bits stop.
    (tmp_path / "blocked").write_text("")
    (folder / "mpi_tp" / "kernels" / "__pycache__").write_text("")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "blocked"), "HOME": str(tmp_path / "blocked")}
    assert len(outputs(start(folder, **variables))) == 1
    assert stat.S_ISREG((tmp_path / "blocked").stat().st_mode)


def test_importing_the_package_imports_no_compiler():
    code = "import sys, mpi_tp.kernels; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
