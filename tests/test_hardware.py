"""Probes of the machine: what they read, and that the unknown stays unknown."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from poros import hardware
from poros.errors import PorosError
from poros.units import GIB, MIB

SMI_TABLE = """\
NVIDIA H200, 143771, 143061, 9.0, 580.95.05
NVIDIA Odd Card, [N/A], [N/A], [N/A], 580.95.05
"""
SMI_HEADER = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |"


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)


def answer(monkeypatch, outputs: dict[int, str]) -> None:
    """Let every command print `outputs[number of its arguments]`, or be missing."""

    def run(command, **_):
        if len(command) not in outputs:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, stdout=outputs[len(command)])

    monkeypatch.setattr(subprocess, "run", run)


def test_nvidia_smi_is_read(monkeypatch):
    answer(monkeypatch, {3: SMI_TABLE, 1: SMI_HEADER})
    gpus, driver = hardware.nvidia()
    assert gpus == [
        hardware.Gpu("NVIDIA H200", 143771 * MIB, 143061 * MIB, "9.0"),
        hardware.Gpu("NVIDIA Odd Card", None, None, None),
    ]
    assert driver == hardware.Driver("580.95.05", "13.0")


@pytest.mark.parametrize("table", [None, "", "No devices were found\n"])
def test_no_gpu(monkeypatch, table):
    answer(monkeypatch, {} if table is None else {3: table, 1: SMI_HEADER})
    assert hardware.nvidia() == ([], hardware.Driver(None, None))


def test_a_hanging_nvidia_smi_is_unknown(monkeypatch):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert hardware.nvidia() == ([], hardware.Driver(None, None))


@pytest.mark.parametrize(
    ("entry", "files"),
    [
        (
            "0::/box/inner",
            {
                "box/memory.max": 8 * GIB,
                "box/memory.current": 3 * GIB,
                "box/memory.stat": f"anon 1\ninactive_file {GIB}\n",
                "box/inner/memory.max": "max",
                "box/inner/memory.current": GIB,
            },
        ),
        (
            "4:cpu,memory:/not/mounted",
            {
                "memory/memory.limit_in_bytes": 8 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"total_inactive_file {GIB}\ninactive_file 5\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_cgroup_limits_the_memory(monkeypatch, tmp_path, entry, files):
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    proc = tmp_path / "proc/self/cgroup"
    proc.parent.mkdir(parents=True)
    proc.write_text(f"9:name=systemd:/\n{entry}\n")
    read = hardware._read
    monkeypatch.setattr(hardware, "_read", lambda path: read(tmp_path / path.relative_to("/")))
    machine = type("Memory", (), {"total": 64 * GIB, "available": 60 * GIB})
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: machine)
    assert hardware.host_memory() == hardware.HostMemory(8 * GIB, 6 * GIB, limited=True)
    # A machine smaller than the limit is not limited by it.
    machine.total, machine.available = 4 * GIB, 2 * GIB
    assert hardware.host_memory() == hardware.HostMemory(4 * GIB, 2 * GIB, limited=False)


def test_page_lock_limit(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, resource.RLIM_INFINITY))
    assert hardware.page_lock_limit() == 65536
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert hardware.page_lock_limit() == "unlimited"


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    free = hardware.disk_free(tmp_path / "a" / "b")
    assert free is not None and free > 0
    assert not (tmp_path / "a").exists()


def test_hub_cache(monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert hardware.hub_cache() == Path("/h/.cache/huggingface/hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hardware.hub_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/hf")
    assert hardware.hub_cache() == Path("/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/c")
    assert hardware.hub_cache() == Path("/c")


def test_without_torch(no_torch):
    assert hardware.torch_cuda() is None
    assert hardware.measure_link() is None
    assert hardware.missing_packages() == ["torch"]
    with pytest.raises(PorosError, match=r"needs torch, .*pip install \"poros-train\[ml\]\""):
        hardware.require_packages()


@pytest.mark.gpu
def test_link_is_measured():
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    speed = hardware.measure_link()
    assert speed is not None and 0.5 < speed < 500


def test_advice_names_what_stands_in_the_way(monkeypatch):
    monkeypatch.setattr(hardware, "missing_packages", lambda: [])
    machine = dataclasses.replace(
        hardware.inspect(),
        gpus=[hardware.Gpu("card", 8 * GIB, 8 * GIB, "8.6")],
        torch_cuda="13.0",
        link_gb_per_s=20.0,
        wsl=False,
        packages={"torch": "2.13.0"},
    )
    assert hardware.advice(machine) == []
    for change, words in (
        ({"gpus": []}, "no NVIDIA GPU"),
        ({"torch_cuda": None}, "CPU build"),
        ({"link_gb_per_s": None}, "could not use the GPU"),
        ({"wsl": True}, "WSL2"),
    ):
        (note,) = hardware.advice(dataclasses.replace(machine, **change))
        assert words in note
    monkeypatch.setattr(hardware, "missing_packages", lambda: ["trl"])
    (note,) = hardware.advice(machine)
    assert "without trl" in note
