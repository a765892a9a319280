"""What control groups leave of the memory, in both of their versions."""

from pathlib import Path

import pytest
import torch

from mpi_tp.memory import available_bytes, cgroups_available

UNLIMITED = 2**63
MIB = 1 << 20


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def version_2(folder: Path, limit: object, used: int, cache: int) -> None:
    write_group(folder, max=limit, current=used, stat=f"anon 1\ninactive_file {cache}")


def version_1(folder: Path, limit: int, used: int, cache: int) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    write_group(folder, limit_in_bytes=limit, usage_in_bytes=used, stat=stat)


def test_version_2_counts_every_group_up_to_the_root(tmp_path: Path) -> None:
    version_2(tmp_path / "slurm", 1000 * MIB, 300 * MIB, 0)
    version_2(tmp_path / "slurm" / "job_1", "max", 100 * MIB, 0)
    version_2(tmp_path / "slurm" / "job_1" / "step_0", 200 * MIB, 100 * MIB, 50 * MIB)
    found = list(cgroups_available("0::/slurm/job_1/step_0\n", tmp_path))
    assert found == [UNLIMITED, 150 * MIB, 700 * MIB]


def test_version_1_has_a_hierarchy_of_its_own(tmp_path: Path) -> None:
    version_1(tmp_path / "memory" / "slurm" / "uid_0" / "job_1", 400 * MIB, 100 * MIB, 20 * MIB)
    memberships = "9:name=systemd:/other\n4:cpu,memory:/slurm/uid_0/job_1/step_0\n1:cpuset:/\n"
    assert list(cgroups_available(memberships, tmp_path)) == [UNLIMITED, 320 * MIB]


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    version_1(tmp_path / "memory", 64 * MIB, 32 * MIB, 0)
    assert list(cgroups_available("4:memory:/docker/0123\n0::/docker/0123\n", tmp_path)) == [UNLIMITED, 32 * MIB]


@pytest.mark.parametrize("memberships", ["", "0::/\n", "4:memory:/job\n"])
def test_no_limit_is_no_bound(memberships: str, tmp_path: Path) -> None:
    assert list(cgroups_available(memberships, tmp_path)) == [UNLIMITED]


def test_this_machine_has_some_memory_left() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes(torch.device("cpu")) <= total
