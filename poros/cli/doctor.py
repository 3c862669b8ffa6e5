"""`poros doctor`: what this machine has, and what stands in the way."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from poros.hardware import Machine, advice, inspect
from poros.units import format_bytes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Show GPU, driver, packages, memory, page-lock limit, link speed and disk."""
    machine = inspect()
    notes = advice(machine)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(machine), "notes": notes}, indent=2))
        return
    for name, value in _rows(machine):
        typer.echo(f"{name:<18}{value}")
    for note in notes:
        typer.echo(f"note: {note}")


def _rows(machine: Machine) -> list[tuple[str, str]]:
    rows = [
        ("system", machine.system + (" (WSL)" if machine.wsl else "")),
        ("container", machine.container or "none seen"),
        ("processor", f"{_known(machine.cpu)}, {_known(machine.cpu_cores)} cores"),
    ]
    for number, gpu in enumerate(machine.gpus):
        memory = f"{_size(gpu.free_bytes)} free of {_size(gpu.total_bytes)}"
        capability = f"compute capability {_known(gpu.compute_capability)}"
        rows.append((f"GPU {number}", f"{gpu.name}, {memory}, {capability}"))
    if not machine.gpus:
        rows.append(("GPU", "none found"))
    link = machine.link_gb_per_s
    lock = machine.page_lock_bytes
    limited = ", limited by a cgroup" if machine.memory.limited else ""
    rows += [
        ("driver", f"{_known(machine.driver.version)}, CUDA {_known(machine.driver.cuda_version)}"),
        ("CUDA of torch", _known(machine.torch_cuda)),
        ("host to device", "unknown" if link is None else f"{link:.1f} GB/s, pinned"),
        (
            "host memory",
            f"{format_bytes(machine.memory.available_bytes)} available"
            f" of {format_bytes(machine.memory.total_bytes)}{limited}",
        ),
        ("page-lock limit", lock if isinstance(lock, str) else _size(lock)),
        *(("disk free", f"{_size(free)} at {p}") for p, free in machine.disk_free_bytes.items()),
        ("python", machine.python),
    ]
    return rows + [(name, version or "not installed") for name, version in machine.packages.items()]


def _known(value: object) -> str:
    return "unknown" if value is None else str(value)


def _size(value: int | None) -> str:
    return "unknown" if value is None else format_bytes(value)
