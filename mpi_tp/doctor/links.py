"""How two GPUs of a host reach each other: by NVIDIA's management library, without it by what CUDA says."""

from collections.abc import Sequence
from typing import Any

import torch

from mpi_tp.devices import Gpu

NO_LINK = "host memory"


def find_links(rank: int, gpus: Sequence[Gpu | None], visible: Sequence[Gpu]) -> list[str]:
    """Return the way from rank `rank`'s GPU to that of every rank; `gpus` has None for those of other hosts.

    `visible` are the GPUs that this rank sees, in torch's order.
    """
    own = gpus[rank]
    assert own is not None, "a rank is on its own host"
    link = _nvml_link(own) or _cuda_link(own, visible)
    return ["-" if gpu == own else "network" if gpu is None else link(gpu) for gpu in gpus]


def _cuda_link(own: Gpu, visible: Sequence[Gpu]) -> Any:
    def link(other: Gpu) -> str:
        if other not in visible:
            return "hidden"
        can = torch.cuda.can_device_access_peer(visible.index(own), visible.index(other))
        return "P2P" if can else NO_LINK

    return link


def _nvml_link(own: Gpu) -> Any:
    """Return the function that asks NVML; None where that is not installed or does not know the GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        mine = _handle(nvml, own)
    except nvml.NVMLError:
        return None

    def link(other: Gpu) -> str:
        try:
            return nvml_link(nvml, mine, _handle(nvml, other))
        except nvml.NVMLError:
            return "hidden"

    return link


def _handle(nvml: Any, gpu: Gpu) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(gpu.uuid if gpu.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{gpu.uuid}")


def nvml_link(nvml: Any, own: Any, other: Any) -> str:
    """Return the way between two of NVML's handles, such as "NVLink x18"; raises NVMLError."""

    def works(way: int) -> bool:
        return bool(nvml.nvmlDeviceGetP2PStatus(own, other, way) == nvml.NVML_P2P_STATUS_OK)

    if works(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        return f"NVLink x{_count_links(nvml, own, nvml.nvmlDeviceGetPciInfo(other).busId)}"
    return "PCIe P2P" if works(nvml.NVML_P2P_CAPS_INDEX_PCI) else NO_LINK


def _count_links(nvml: Any, own: Any, other_bus: object) -> int:
    """Count the active links that go to the other GPU, or to a switch, which reaches every GPU."""
    count = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(own, number) != nvml.NVML_FEATURE_ENABLED:
                continue
            via_switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(own, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            count += via_switch or nvml.nvmlDeviceGetNvLinkRemotePciInfo(own, number).busId == other_bus
        except nvml.NVMLError:  # no such link
            continue
    return count
