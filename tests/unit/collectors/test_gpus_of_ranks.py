"""A rank's GPU from its environment, from what the driver lists, and without NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadyrun.collectors.gpumap import RankProcess, devices_of_ranks, gpus_of_driver, read_environment
from steadyrun.collectors.nvml.reading import GpuReading


def node(count: int = 4, **processes: tuple[tuple[int, int], ...]) -> list[GpuReading]:
    return [
        GpuReading(
            i,
            uuid=f"GPU-{i}aaa",
            pci=f"0000:{0x18 + i:02x}:00",
            name="NVIDIA H100 80GB HBM3",
            processes=processes.get(f"gpu{i}"),
        )
        for i in range(count)
    ]


def started(root: Path, pid: int, environ: dict[str, str]) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in environ.items()) + b"\0")


@pytest.mark.parametrize(
    ("environ", "local_rank", "index"),
    [
        ({}, 2, 2),
        ({"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, 1, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3aaa"}, 0, 3),
        ({"CUDA_VISIBLE_DEVICES": "2", "LOCAL_RANK": "0"}, 2, 2),  # each rank is shown its own device alone
        ({"LOCAL_RANK": "1"}, 3, 1),
    ],
)
def test_the_environment_decides(tmp_path: Path, environ: dict[str, str], local_rank: int, index: int) -> None:
    started(tmp_path, 100, environ)
    (device,) = devices_of_ranks({5: RankProcess(100, local_rank)}, node(), tmp_path).values()
    assert (device.index, device.is_seen, device.why) == (index, False, "")
    assert (device.uuid, device.label) == (f"GPU-{index}aaa", f"GPU {index} (0000:{0x18 + index:02x}:00)")


def test_what_the_driver_lists_goes_first(tmp_path: Path) -> None:
    gpus = node(gpu3=((100, 8 << 30),), gpu0=((77, 1 << 30),))
    process = RankProcess(100, 0, {"LOCAL_RANK": "0"})
    device = devices_of_ranks({0: process}, gpus, tmp_path)[0]
    assert (device.index, device.is_seen, device.others) == (3, True, ())


def test_of_several_gpus_the_one_that_it_fills_is_its_own(tmp_path: Path) -> None:
    gpus = node(gpu0=((100, 500 << 20),), gpu1=((100, 60 << 30),), gpu2=((100, 500 << 20),))
    device = devices_of_ranks({0: RankProcess(100, 0, {})}, gpus, tmp_path)[0]
    assert (device.index, device.others) == (1, (0, 2))


def test_where_sizes_are_not_told_the_environment_chooses_among_them(tmp_path: Path) -> None:
    gpus = node(gpu0=((100, 0),), gpu2=((100, 0),))
    device = devices_of_ranks({0: RankProcess(100, 2, {})}, gpus, tmp_path)[0]
    assert (device.index, device.others) == (2, (0,))


def test_numa_comes_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    found = devices_of_ranks({0: RankProcess(1, 0, {}), 1: RankProcess(2, 1, {})}, node(), tmp_path)
    assert (found[0].numa, found[1].numa) == (None, 1)


def test_a_mig_instance_is_named(tmp_path: Path) -> None:
    process = RankProcess(1, 0, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-2aaa/1/0"})
    device = devices_of_ranks({0: process}, node(), tmp_path)[0]
    assert (device.index, device.mig) == (2, "MIG-GPU-2aaa/1/0")


@pytest.mark.parametrize(
    ("process", "gpus", "why"),
    [
        (RankProcess(1, 0, {}), [], "no GPU is known"),
        (RankProcess(1, 9, {}), node(), "beyond the 4 GPUs"),
        (RankProcess(1, 0, {"CUDA_VISIBLE_DEVICES": ""}), node(), "beyond CUDA_VISIBLE_DEVICES="),
        (RankProcess(999, 0), node(), "environment of process 999 cannot be read"),
    ],
)
def test_what_cannot_be_told_says_why(tmp_path: Path, process: RankProcess, gpus: list[GpuReading], why: str) -> None:
    device = devices_of_ranks({0: process}, gpus, tmp_path)[0]
    assert device.index is None
    assert device.label == ""
    assert why in device.why


def test_only_what_decides_is_kept_of_an_environment(tmp_path: Path) -> None:
    started(tmp_path, 7, {"SECRET": "x", "CUDA_VISIBLE_DEVICES": "1=2,3"})
    assert read_environment(7, tmp_path) == {"CUDA_VISIBLE_DEVICES": "1=2,3"}


def test_the_kernel_module_lists_gpus_without_nvml(tmp_path: Path) -> None:
    for name, text in {
        "0000:cb:00.0": "Model: \t\t NVIDIA H100\nIRQ: 99\nGPU UUID: \t GPU-bbb\nBus Location: \t 0000:cb:00.0\n"
        "Device Minor: \t 1\n",
        "0000:18:00.0": "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-aaa\nBus Location: \t 0000:18:00.0\n"
        "Device Minor: 0\n",
    }.items():
        folder = tmp_path / "proc/driver/nvidia/gpus" / name
        folder.mkdir(parents=True)
        (folder / "information").write_text(text)
    (tmp_path / "proc/driver/nvidia/gpus/0000:da:00.0").mkdir()  # its file cannot be read
    found = gpus_of_driver(tmp_path)
    assert [(g.index, g.pci, g.uuid, g.minor) for g in found] == [
        (0, "0000:18:00", "GPU-aaa", 0),
        (1, "0000:cb:00", "GPU-bbb", 1),
        (2, "0000:da:00", "", None),
    ]
    assert gpus_of_driver(tmp_path / "nowhere") == ()
