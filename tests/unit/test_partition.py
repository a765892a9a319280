"""Every index is held, evenly, and each query head finds its key/value head, over many sizes."""

import itertools

import pytest

from mpi_tp.models.families import tensor_table
from mpi_tp.partition.plan import STRATEGIES, PlannedTensor, Strategy, plan_shards
from mpi_tp.partition.ranges import VECTOR_UNIT, Blocks, KeyValueHeads, QueryHeads, block_range, length
from tests.support.tiny import TINY_CONFIGS

HEADS = [(heads, kv) for heads in (1, 2, 3, 5, 8, 9, 12, 14, 32) for kv in range(1, heads + 1) if heads % kv == 0]


@pytest.mark.parametrize("unit", [1, 3, 16])
def test_blocks_follow_one_another_and_are_even(unit: int) -> None:
    for n, size in itertools.product(range(1, 120), range(1, 9)):
        spans = [block_range(n, size, rank, unit) for rank in range(size)]
        starts, stops = zip(*spans, strict=True)
        assert starts[0] == 0
        assert stops[-1] == n
        assert starts[1:] == stops[:-1], f"a gap or an overlap in {spans}"
        assert all(start % unit == 0 or start == n for start in starts)
        units = [-(-(stop - start) // unit) for start, stop in spans]
        assert max(units) - min(units) <= 1, f"{spans} differ by more than a unit of {unit}"
        assert units == sorted(units, reverse=True)


def test_feature_blocks_leave_no_rank_empty_and_keep_slices_aligned() -> None:
    for size in range(1, 9):
        for n in range(size, 300):
            spans = [Blocks(n).ranges(rank, size) for rank in range(size)]
            assert all(length(span) > 0 for span in spans), f"{n} features over {size} ranks: {spans}"
            if n >= VECTOR_UNIT * size:
                assert all(span[0][0] % VECTOR_UNIT == 0 for span in spans)


def test_more_ranks_than_features_gives_empty_ranks_no_range() -> None:
    assert [Blocks(2).ranges(rank, 3) for rank in range(3)] == [((0, 1),), ((1, 2),), ()]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_query_head_finds_its_key_value_head(num_heads: int, num_kv_heads: int) -> None:
    queries, keys = QueryHeads(num_heads, 4), KeyValueHeads(num_heads, num_kv_heads, 4)
    for size in range(1, min(num_heads, 9) + 1):
        held: list[int] = []
        for rank in range(size):
            own = range(*queries.heads(rank, size))
            needed = [head * num_kv_heads // num_heads for head in own]  # query heads of a group are neighbours
            local = list(range(*keys.heads(rank, size)))
            assert len(own) in (num_heads // size, num_heads // size + 1)
            assert [local[i] for i in keys.index(rank, size)] == needed
            assert local == sorted(set(needed)), "a rank holds a head that none of its queries read"
            assert queries.ranges(rank, size) == ((own.start * 4, own.stop * 4),)
            assert keys.ranges(rank, size) == ((local[0] * 4, (local[-1] + 1) * 4),)
            held += own
        assert held == list(range(num_heads))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_plans_hold_every_index_of_every_tensor(name: str, strategy: Strategy) -> None:
    config = TINY_CONFIGS[name]
    for size in range(1, config["num_attention_heads"] + 1):
        for planned in plan_shards(tensor_table(config), strategy, size).values():
            _check_covers(planned, size)


def _check_covers(planned: PlannedTensor, size: int) -> None:
    if planned.axis is None:
        assert all(planned.local_shape(rank) == planned.shape for rank in range(size))
        return
    held = [{i for span in ranges for i in range(*span)} for ranges in planned.ranges]
    assert set().union(*held) == set(range(planned.shape[planned.axis])), planned.name
    for rank, indices in enumerate(held):
        expected = list(planned.shape)
        expected[planned.axis] = len(indices)
        assert planned.local_shape(rank) == tuple(expected)
    if not planned.name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
        assert sum(map(len, held)) == planned.shape[planned.axis], f"{planned.name} is held twice"


def test_down_projection_is_split_as_its_input_under_paired() -> None:
    plan = plan_shards(tensor_table(TINY_CONFIGS["llama"]), "paired", 3)
    prefix = "model.layers.0."
    assert plan[prefix + "mlp.down_proj.weight"].axis == 1
    assert plan[prefix + "mlp.down_proj.weight"].ranges == plan[prefix + "mlp.up_proj.weight"].ranges
    assert plan[prefix + "self_attn.o_proj.weight"].ranges == plan[prefix + "self_attn.q_proj.weight"].ranges
