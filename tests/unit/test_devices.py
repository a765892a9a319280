"""Which GPU each rank takes, by what all of them see."""

from dataclasses import dataclass

import pytest
import torch

from mpi_tp.devices import Gpu, RankView, assign_gpus, by_host, hidden_peers, rank_names, visible_gpus
from mpi_tp.errors import ConfigurationError


def view(host: str, local_rank: int, uuids: str) -> RankView:
    """A rank that sees a GPU for each letter."""
    return RankView(host, local_rank, tuple(Gpu(f"GPU-{letter}", "H200") for letter in uuids))


def host_views(*uuids: str) -> list[RankView]:
    """All ranks of one host."""
    return [view("node0", local_rank, own) for local_rank, own in enumerate(uuids)]


@pytest.mark.parametrize(
    ("views", "choices"),
    [
        (host_views("abcd", "abcd", "abcd"), [0, 1, 2]),
        (host_views("a", "b", "c"), [0, 0, 0]),  # bound by the launcher, one each
        (host_views("ab", "cd"), [0, 1]),  # two each
        (host_views("ab", "ba"), [0, 0]),  # the second in an order of its own
        (host_views("ab", "a"), [1, 0]),  # the second has no choice
        (host_views("abc", "ab", "a"), [2, 1, 0]),
        (
            [view("node0", 0, "ab"), view("node0", 1, "ab"), view("node1", 0, "cd"), view("node1", 1, "cd")],
            [0, 1, 0, 1],
        ),
        ([view("node0", 0, "ab"), view("node1", 0, "cd"), view("node0", 1, "ab")], [0, 0, 1]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(views: list[RankView], choices: list[int]) -> None:
    assert assign_gpus(views, share_gpu=False) == choices
    assert len({views[rank].gpus[choice] for rank, choice in enumerate(choices)}) == len(views)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        (host_views("a", "a"), r"ranks 0, 1 would share a GPU of node0, which has 2 ranks and shows them 1 GPU"),
        (host_views("ab", "ab", "ab"), r"ranks 0, 2 .*has 3 ranks and shows them 2 GPU\(s\): .*--share-gpu"),
    ],
)
def test_fewer_gpus_than_ranks_are_refused(views: list[RankView], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        assign_gpus(views, share_gpu=False)


def test_shared_gpus_have_as_many_ranks_each() -> None:
    assert assign_gpus(host_views("ab", "ab", "ab", "ab"), share_gpu=True) == [0, 1, 0, 1]


def test_ranks_without_a_gpu_are_named_with_their_hosts() -> None:
    views = [*host_views("a", "", ""), view("node1", 0, "")]
    with pytest.raises(ConfigurationError, match=r"on node0 \(ranks 1, 2\), node1 \(rank 3\): .*--device cpu"):
        assign_gpus(views, share_gpu=True)


def test_gpus_that_are_hidden_from_peers_are_worth_a_warning() -> None:
    assert hidden_peers(host_views("ab", "ab"), [0, 1]) is None
    assert hidden_peers([view("node0", 0, "a"), view("node1", 0, "b")], [0, 0]) is None
    hidden = hidden_peers([*host_views("a", "b"), view("node1", 0, "c")], [0, 0, 0])
    assert hidden is not None
    assert "node0 (ranks 0, 1): NCCL" in hidden
    assert "--gpus-per-node" in hidden


@dataclass(frozen=True)
class Properties:
    uuid: str
    name: str


@pytest.mark.parametrize(
    ("visible_devices", "uuid"),
    [
        ("", "own"),
        ("1,0", "own"),
        ("GPU-8932f937-d72c", "own"),
        ("MIG-4f6a,MIG-77cc", "MIG-4f6a"),
        ("MIG-GPU-8932f937/1/0", "MIG-GPU-8932f937/1/0"),
    ],
)
def test_visible_devices_are_names_and_no_numbers(
    monkeypatch: pytest.MonkeyPatch, visible_devices: str, uuid: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties("own", "A100 MIG 1g.5gb"))
    (gpu,) = visible_gpus(visible_devices)
    assert gpu.uuid == uuid
    assert gpu.is_slice


def test_ranks_are_named_for_people() -> None:
    assert [rank_names(ranks) for ranks in ([3], [0, 1], [1, 2, 3], [0, 2, 3])] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 1-3",
        "ranks 0, 2, 3",
    ]
    assert by_host([view("b", 0, ""), view("a", 0, "")], [0, 1]) == "b (rank 0), a (rank 1)"
