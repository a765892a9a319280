"""The doctor's rows, from what ranks might find."""

import fcntl
import io
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi_tp.comm.threads import ThreadCommunicator, run_ranks
from mpi_tp.devices import Gpu, RankView
from mpi_tp.doctor.cluster import Place, driver_version, judge_places, versions_check
from mpi_tp.doctor.cores import Cores, judge_binding, judge_shared_memory, judge_threads
from mpi_tp.doctor.files import Sample, judge_locking, judge_storage, read_sample, set_check, shares, try_lock
from mpi_tp.doctor.fit import Need, judge_memory
from mpi_tp.doctor.gpus import add_up, judge_links, judge_views, own_device
from mpi_tp.doctor.links import NO_LINK, find_links
from mpi_tp.doctor.panel import ask_bounded
from mpi_tp.doctor.rows import Report, Row, failure, ok, warning
from mpi_tp.errors import ConfigurationError, FileError
from mpi_tp.shards.reader import ShardSet
from tests.support.shards import write_small

HOSTS = ["node0", "node0", "node1", "node1"]
MIB = 1 << 20


def said(row: Row, status: str, *words: str) -> None:
    assert row.status == status, row
    for word in words:
        assert word in row.text


# --- the report ---


def test_failures_stand_last() -> None:
    stream = io.StringIO()
    report = Report(stream)
    for name, row in (("one", ok("fine", "a line")), ("two", failure("is\nbad")), ("three", warning("slow"))):
        report.add(name, row)
    assert report.close() == 78
    assert stream.getvalue().splitlines() == [
        "ok       one            fine",
        "                        a line",
        "failure  two            is bad",
        "warning  three          slow",
        "",
        "1 of 3 checks failed",
        "failure  two            is bad",
    ]


def test_warnings_are_no_failures() -> None:
    report = Report(io.StringIO())
    report.add("one", warning("slow"))
    assert report.close() == 0


def test_other_ranks_print_nothing_and_know_the_code() -> None:
    report = Report(None)
    report.add("one", failure("bad"))
    assert report.close() == 78


# --- answers ---


def fail(error: Exception) -> None:
    raise error


def test_what_a_probe_raises_is_its_answer() -> None:
    assert ask_bounded(lambda: 3, 60).value == 3
    assert ask_bounded(lambda: fail(FileError("no file")), 60).error == "no file"
    assert ask_bounded(lambda: fail(ZeroDivisionError("by 0")), 60).error == "ZeroDivisionError: by 0"


def test_a_probe_that_hangs_is_left_behind() -> None:
    released = threading.Event()
    answer = ask_bounded(released.wait, 0.1)
    released.set()
    assert answer.is_late
    assert answer.error is not None
    assert "no answer in 0.1 s, it hangs at threading.py" in answer.error


# --- launcher and software ---


def test_hosts_are_named_with_their_ranks() -> None:
    row = judge_places([Place(host, "srun") for host in HOSTS])
    said(row, "ok", "4 rank(s)", "from srun", "2 host(s): node0 (ranks 0, 1), node1 (ranks 2, 3)")


def test_unequal_versions_are_a_failure_with_both() -> None:
    judge = versions_check(["node0", "node1"]).judge
    said(judge([{"MPI": "MPICH 5"}] * 2), "ok", "MPI MPICH 5")
    with pytest.raises(ConfigurationError, match="rank 1 on node1 has MPI Open MPI 5, rank 0 on node0 has MPICH 5"):
        judge([{"MPI": "MPICH 5"}, {"MPI": "Open MPI 5"}])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build\nGCC 12.3.0\n", "580.95"),
    ],
)
def test_the_drivers_version_is_read_from_its_file(text: str, version: str, tmp_path: Path) -> None:
    assert driver_version(tmp_path / "version") == "none"
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version


# --- devices ---


def views(*uuids: str, model: str = "H200") -> list[RankView]:
    return [
        RankView("node0", rank, tuple(Gpu(f"GPU-{letter}", model) for letter in own)) for rank, own in enumerate(uuids)
    ]


def test_no_gpu_is_no_failure() -> None:
    said(judge_views(views("", "")), "skipped", "no GPU is visible")
    assert own_device(views("", ""), 1) == torch.device("cpu")


def test_each_ranks_gpu_is_shown() -> None:
    row = judge_views(views("ab", "ab"))
    said(row, "ok", "of its own")
    assert row.details == ("rank 0: H200 GPU-a of node0", "rank 1: H200 GPU-b of node0")
    assert own_device(views("ab", "ab"), 1) == torch.device("cuda", 1)


def test_two_ranks_on_one_gpu_are_a_failure_that_names_them() -> None:
    with pytest.raises(ConfigurationError, match="ranks 0, 1 would share a GPU of node0"):
        judge_views(views("a", "a"))
    assert own_device(views("a", "a"), 0) is None


def test_gpus_that_some_ranks_do_not_see_are_a_failure() -> None:
    with pytest.raises(ConfigurationError, match=r"no GPU is visible on node0 \(rank 1\)"):
        judge_views(views("a", ""))


def test_one_visible_gpu_a_rank_is_a_warning() -> None:
    said(judge_views(views("a", "b")), "warning", "hidden", "--gpus-per-node")


def test_slices_are_a_warning() -> None:
    said(judge_views(views("a", "b", model="A100 MIG 1g.5gb")), "warning", "ranks 0, 1 have MIG slices")
    said(judge_views(views("a", model="A100 MIG 1g.5gb")), "ok")


# --- links ---


class FakeNvml(types.ModuleType):
    """Two GPUs, a and b, with three links, of which one goes from GPU to GPU, one to a switch, and one is off."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_CAPS_INDEX_PCI = 2, 4
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 1, 2

    def __init__(self, ways: tuple[int, ...]) -> None:
        super().__init__("pynvml")
        self.ways = ways

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetP2PStatus(self, own: str, other: str, way: int) -> int:
        return 0 if way in self.ways else 5

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(busId=f"bus of {handle}")

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link > 2:
            raise self.NVMLError
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:
        return 2 if link else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:
        return types.SimpleNamespace(busId="bus of GPU-b")


A, B, C = (Gpu(f"GPU-{letter}", "H200") for letter in "abc")


@pytest.mark.parametrize(("ways", "link"), [((2, 4), "NVLink x2"), ((4,), "PCIe P2P"), ((), NO_LINK)])
def test_nvml_tells_the_links(monkeypatch: pytest.MonkeyPatch, ways: tuple[int, ...], link: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(ways))
    assert find_links(0, [A, B, C, None], [A]) == ["-", link, "hidden", "network"]


def test_without_nvml_cuda_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) == (1, 0))
    assert find_links(0, [A, B, C], [B, A]) == ["-", "P2P", "hidden"]


def test_a_matrix_shows_the_links() -> None:
    row = judge_links(["node0", "node0"], [["-", "NVLink x18"], ["NVLink x18", "-"]])
    said(row, "ok", "NVLink x18")
    assert row.details == (
        "        rank 0      rank 1",
        "rank 0  -           NVLink x18",
        "rank 1  NVLink x18  -",
    )


def test_gpus_that_do_not_reach_each_other_are_a_warning() -> None:
    said(judge_links(["node0"] * 2, [["-", NO_LINK], [NO_LINK, "-"]]), "warning", "ranks 0 and 1 on node0")
    said(judge_links(["node0", "node1"], [["-", "network"], ["network", "-"]]), "ok", "no host has two")


# --- sums ---


def test_sums_of_all_ranks_are_right() -> None:
    assert run_ranks(3, lambda comm: add_up(comm, torch.device("cpu"))) == ["Thread"] * 3


def test_a_wrong_sum_is_told() -> None:
    class Lossy(ThreadCommunicator):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            super().all_reduce(tensor)[0] -= 1
            return tensor

    def add(comm: ThreadCommunicator) -> None:
        with pytest.raises(ConfigurationError, match="1 of 1 sums over 2 ranks are wrong, such as 2 instead of 3"):
            add_up(Lossy(comm._group, comm.rank), torch.device("cpu"))

    run_ranks(2, add)


# --- cores and shared memory ---


def cores(*allowed: str, threads: int = 1, on_host: int = 8) -> list[Cores]:
    """A rank for each text, in which every digit is a core."""
    return [Cores(frozenset(map(int, text)), on_host, threads) for text in allowed]


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        (cores("0", "1", "0", "1"), "ok", "own"),  # of two hosts
        (cores("01234567", "01234567", "0", "1"), "ok", "share"),
        (cores("0", "0", "1", "2"), "warning", "ranks 0, 1 on node0 are all bound to core 0 of 8"),
        (cores("0", "1", "2", "2"), "warning", "ranks 2, 3 on node1 are all bound to core 2 of 8"),
        (cores("0", "0", "0", "0", on_host=1), "ok", "share"),  # there is no other core
    ],
)
def test_ranks_on_one_core_are_noticed(found: list[Cores], status: str, word: str) -> None:
    said(judge_binding(HOSTS, found), status, word)


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        (cores("0123", "0123", "01", "23", threads=2), "ok", "2 a rank"),
        (
            cores("0123", "0123", "0123", "0123", threads=4),
            "warning",
            "8 threads and have 4 core(s): set OMP_NUM_THREADS=2",
        ),
        (
            cores("0", "0", "1", "2"),
            "warning",
            "2 rank(s) on node0 compute on 2 threads and have 1 core(s): start fewer",
        ),
    ],
)
def test_more_threads_than_cores_are_noticed(found: list[Cores], status: str, word: str) -> None:
    said(judge_threads(HOSTS, found), status, word)


def test_little_shared_memory_is_a_warning() -> None:
    said(judge_shared_memory(HOSTS, [1 << 30] * 4), "ok", "1,024 MiB free")
    said(judge_shared_memory(HOSTS, [1 << 30, 1 << 30, 60 * MIB, 60 * MIB]), "warning", "node1 has 60 MiB free", "64")
    said(judge_shared_memory(["node0"], [MIB]), "ok")  # one rank has nobody to share with


# --- the set ---


def test_a_set_must_be_the_same_for_all_ranks() -> None:
    judge = set_check(Path("shards")).judge
    said(judge(["abc", "abc"]), "ok", "set abc")
    with pytest.raises(ConfigurationError, match="shards/ is set xyz for rank 1, and abc for rank 0"):
        judge(["abc", "xyz"])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_tensor_is_verified_by_one_rank(size: int, tmp_path: Path) -> None:
    write_small(tmp_path / "shards")
    entries = list(ShardSet.open(tmp_path / "shards").manifest.tensors.values()) * 3
    parts = shares(entries, size)
    assert sorted(entry.name for part in parts for entry in part) == sorted(entry.name for entry in entries)
    totals = [sum(entry.num_bytes for entry in part) for part in parts]
    assert max(totals) - min(totals) <= max(entry.num_bytes for entry in entries)


def test_a_sample_ends_by_bytes_by_time_or_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(40 << 20))
    assert read_sample(path, 1 << 30, 600).num_bytes == 40 << 20
    assert read_sample(path, 20 << 20, 600).num_bytes == 32 << 20
    assert read_sample(path, 1 << 30, 0) == Sample(0, 40 << 20, pytest.approx(0, abs=60))
    with pytest.raises(FileError, match="missing cannot be read: No such file"):
        read_sample(tmp_path / "missing", 1, 1)


def test_slow_storage_is_a_warning_with_the_time_to_load() -> None:
    fast, slow = Sample(1 << 30, 10**10, 1.0), Sample(100 * MIB, 10**10, 5.0)
    said(judge_storage([fast, fast]), "ok", "2,147 MB/s together")
    said(judge_storage([fast, slow]), "warning", "21 the slowest (rank 1)", "476.8 s")
    said(judge_storage([Sample(MIB, MIB, 0.001)]), "ok", "too small")


def test_locks_are_tried_as_hdf5_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert try_lock(path) == ""
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert try_lock(path) == "another program has the file locked"
    os.close(descriptor)


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "file").touch()
    reasons = ["", try_lock(tmp_path / "file")]
    said(judge_locking(reasons), "warning", "rank 1", "Function not implemented", "HDF5_USE_FILE_LOCKING=FALSE")
    said(judge_locking(["", ""]), "ok")


# --- memory ---


def need(pool: str, free: int, weights: int, token_bytes: int = 1024, share: float = 0.5) -> Need:
    return Need(pool, free * MIB, weights * MIB, token_bytes, share)


def test_the_ranks_of_a_host_share_its_memory() -> None:
    row = judge_memory([need("node0", 400, 100), need("node0", 420, 100)], context=1000)
    said(row, "ok", "weights need 200 MiB of node0 and 400 MiB are free", "51,200 tokens")


def test_gpus_are_compared_one_by_one_and_the_tightest_is_told() -> None:
    row = judge_memory([need("rank 0's GPU", 400, 100), need("rank 1's GPU", 300, 100)], context=200_000)
    said(row, "warning", "100 MiB of rank 1's GPU and 300 MiB", "102,400 tokens", "context of 200,000")


@pytest.mark.parametrize("needs", [[need("node0", 199, 100)] * 2, [need("node0", 200, 100, 10**9)] * 2])
def test_too_little_memory_is_a_failure(needs: list[Need]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"ranks 0, 1 need 200 MiB of node0 .* (199|200) MiB are free: use more"
    ):
        judge_memory(needs, context=1000)


def test_linear_layers_need_no_cache() -> None:
    said(judge_memory([need("node0", 400, 100, token_bytes=0)], context=0), "ok", "400 MiB are free")
