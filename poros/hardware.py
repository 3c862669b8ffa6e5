"""What this machine has: GPUs, memory, page-lock limit, link, disk, package versions.

Every probe answers None where it cannot know, printed as "unknown": a guess here would end as a
wrong plan. torch is used where it is installed and nothing needs it, because the first question
of a new user is why CUDA does not work.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from poros.errors import PorosError
from poros.shapes import hub_cache
from poros.units import MIB

ML_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "bitsandbytes",
    "datasets",
    "accelerate",
    "safetensors",
)

_INSTALL = 'pip install "poros-train[ml]"'
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. Memory in bytes; `free_bytes` is what no process holds at this moment."""

    name: str
    total_bytes: int | None
    free_bytes: int | None
    compute_capability: str | None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver and the newest CUDA version that it serves."""

    version: str | None
    cuda_version: str | None


@dataclass(frozen=True)
class HostMemory:
    """Host memory that this process may use, in bytes; `limited` where a cgroup caps it."""

    total_bytes: int
    available_bytes: int
    limited: bool


@dataclass(frozen=True)
class Machine:
    """Everything `poros doctor` shows. None is unknown, or not installed for a package."""

    system: str
    python: str
    cpu: str | None
    cpu_cores: int | None
    wsl: bool
    container: str | None
    gpus: list[Gpu]
    driver: Driver
    torch_cuda: str | None
    link_gb_per_s: float | None
    memory: HostMemory
    page_lock_bytes: int | Literal["unlimited"] | None
    disk_free_bytes: dict[str, int | None]
    packages: dict[str, str | None]


def inspect() -> Machine:
    """Probe this machine, the link to its GPU, the disks of this folder and of the hub cache."""
    gpus, driver = nvidia()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=cpu_name(),
        cpu_cores=cpu_cores(),
        wsl="microsoft" in platform.release().lower(),
        container=container(),
        gpus=gpus,
        driver=driver,
        torch_cuda=torch_cuda(),
        link_gb_per_s=measure_link(),
        memory=host_memory(),
        page_lock_bytes=page_lock_limit(),
        disk_free_bytes={str(path): disk_free(path) for path in (Path.cwd(), hub_cache())},
        packages=package_versions(),
    )


def nvidia() -> tuple[list[Gpu], Driver]:
    """The GPUs and the driver that nvidia-smi names; none of either where it is missing."""
    table = _output(
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free,compute_cap,driver_version",
        "--format=csv,noheader,nounits",
    )
    gpus, version = [], None
    for row in csv.reader((table or "").splitlines(), skipinitialspace=True):
        if len(row) != 5:
            continue
        name, total, free, capability, version = row
        known = re.fullmatch(r"\d+\.\d+", capability)
        gpus.append(Gpu(name, _mib(total), _mib(free), capability if known else None))
    shown = re.search(r"CUDA Version\s*:\s*([\d.]+)", _output("nvidia-smi") or "") if gpus else None
    return gpus, Driver(version, shown[1] if shown else None)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None without torch or with a CPU build."""
    torch = _torch()
    return torch.version.cuda if torch else None


def measure_link() -> float | None:
    """Host-to-device GB/s (10**9 bytes) of pinned copies to the first GPU; None without one.

    Takes 64 MiB of pinned and of device memory for some hundredths of a second.
    """
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return None
    size, repeats = 64 * MIB, 8
    try:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        device.copy_(host, non_blocking=True)
        start.record()
        for _ in range(repeats):
            device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
    except RuntimeError:  # a GPU that others have filled, or a page-lock limit below 64 MiB
        return None
    return float(repeats * size / (start.elapsed_time(end) * 1e6))


def host_memory() -> HostMemory:
    """Memory of the machine, or of the tightest cgroup around this process where that is less."""
    memory = psutil.virtual_memory()
    total, available, limited = memory.total, memory.available, False
    for limit, used in _cgroup_limits():
        if limit < total:
            total, limited = limit, True
        available = min(available, max(limit - used, 0))
    return HostMemory(total, available, limited)


def page_lock_limit() -> int | Literal["unlimited"] | None:
    """RLIMIT_MEMLOCK in bytes. A driver may allow more or less: only an attempt tells."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def disk_free(path: Path) -> int | None:
    """Free bytes on the disk where `path` lies, or would lie once its folders are made."""
    path = path.absolute()
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free


def package_versions() -> dict[str, str | None]:
    """Version of each package of the `ml` extra; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ML_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def missing_packages() -> list[str]:
    """Packages of the `ml` extra that Python does not find."""
    return [name for name in ML_PACKAGES if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Make sure that this Python can train.

    Raises:
        PorosError: packages of the `ml` extra are missing.
    """
    if missing := missing_packages():
        raise PorosError(f"training needs {', '.join(missing)}, not found here: {_INSTALL}")


def advice(machine: Machine) -> list[str]:
    """What stands between this machine and a streamed run on its GPU, each with what to do."""
    notes = []
    if missing := missing_packages():
        notes.append(f"cannot train without {', '.join(missing)}: {_INSTALL}")
    if not machine.gpus:
        notes.append("no NVIDIA GPU was found: runs take the CPU, which suits small models only")
    elif machine.packages["torch"] and machine.torch_cuda is None:
        notes.append("torch is a CPU build or broken, though there is a GPU: install a CUDA build")
    elif machine.packages["torch"] and machine.link_gb_per_s is None:
        notes.append("torch could not use the GPU: compare the driver's CUDA with that of torch")
    if machine.wsl:
        notes.append("WSL2 caps page-locked memory, often far below the RAM: copies may be slower")
    return notes


def container() -> str | None:
    """Name of the container system around this process; None where no sign of one is seen."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    return os.environ.get("container")  # set by systemd-nspawn and LXC


def cpu_cores() -> int | None:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_name() -> str | None:
    """The processor's name."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")) or "", re.M)
    return found[1] if found else platform.processor() or None


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup around this process that has a memory limit."""
    root = Path("/sys/fs/cgroup")
    pairs = []
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be the host's and lie outside what is mounted: the top
        # folder is then the container's own group.
        group = top / inner.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            limit, used = _read(folder / names[0]), _read(folder / names[1])
            if limit and used and limit.strip().isdigit() and int(limit) < _UNLIMITED:
                # File pages that the kernel drops under pressure count as used there.
                stat = _read(folder / "memory.stat") or ""
                cache = re.search(rf"^{names[2]} (\d+)$", stat, re.M)
                pairs.append((int(limit), int(used) - (int(cache[1]) if cache else 0)))
    return pairs


def _torch() -> Any:
    """The torch module; None where it is missing or too broken to import."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.strip().isdigit() else None
