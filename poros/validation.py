"""Validation artifacts: every measured claim as raw JSON, written here and nowhere else.

One writer checks the names, so that the tables of the documentation can be made from any set of
artifacts: a metric has one name and one unit, a case one spelling. A measurement writes its
artifact again after every result; each write replaces the file whole, so that a run which is cut
short leaves the results it had.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poros import hardware
from poros.shapes import KNOWN_MODELS
from poros.units import GIB

METRICS = {
    "step_ms": "ms",  # median over the case's num_steps
    "step_ms_min": "ms",
    "step_ms_max": "ms",
    "peak_allocated_gib": "GiB",  # torch's allocator
    "peak_driver_gib": "GiB",  # in use on the whole device, CUDA context included
    "rss_peak_gib": "GiB",
    "ratio_to_resident": "ratio",  # step time over that of the same modules, all blocks held
    "ratio_to_peft": "ratio",  # step time over that of PEFT + bitsandbytes as people run it
    "floor_share": "ratio",
    "loads_per_step": "blocks",
    "link_used_gb_per_s": "GB/s",  # bytes copied in a step over its time
    "max_abs_diff": "abs",
    "num_tensors_equal": "tensors",
    "num_tensors": "tensors",
}
"""Every metric and its unit. GiB are 2**30 bytes, GB 10**9."""

_CASE: dict[str, tuple[type, ...] | set[str] | re.Pattern[str]] = {
    "model": {*KNOWN_MODELS, "custom"},
    "program": {"streamed", "resident", "peft"},
    "quantization": {"nf4", "bf16"},
    "lora": {"all-linear", "qv"},
    "lora_rank": (int,),
    "lora_dropout": (float,),
    "tokens": re.compile(r"[1-9]\d*x[1-9]\d*"),
    "block_size": (int,),
    "num_blocks": (int,),
    "num_steps": (int,),
    "compute": {"exact", "fast"},
    "store": {"ram", "disk"},
    "surface": {
        "loss",
        "logits",
        "gradients",
        "gradient_norm",
        "adapters",
        "optimizer",
        "random_state",
    },
}
_MACHINE = ("gpu", "driver", "cpu_cores", "ram_gib", "link_gb_per_s", "vram_cap_gib")
_KEYS = ("name", "date", "commit", "command", "machine", "versions", "rows")


def row(case: Mapping[str, Any], metric: str, value: float) -> dict[str, Any]:
    """One measured value in the form of an artifact's rows.

    Raises:
        ValueError: an unknown metric or case key, a case value that is not canonical, or a value
            that is no finite number.
    """
    if metric not in METRICS:
        raise ValueError(f"metric {metric!r} is unknown; known: {', '.join(METRICS)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{metric}: {value!r} is no finite number")
    for key, given in case.items():
        _check_case(key, given)
    return {"case": dict(case), "metric": metric, "value": value, "unit": METRICS[metric]}


def machine(link_gb_per_s: float | None, vram_cap_gib: float | None = None) -> dict[str, Any]:
    """This machine as artifacts name it; None where it is not known or there is none.

    `link_gb_per_s` is what the run measured itself; `vram_cap_gib` a limit set on its allocator.
    """
    gpus, driver = hardware.nvidia()
    return {
        "gpu": gpus[0].name if gpus else None,
        "driver": driver.version,
        "cpu_cores": hardware.cpu_cores(),
        "ram_gib": round(hardware.host_memory().total_bytes / GIB, 1),
        "link_gb_per_s": None if link_gb_per_s is None else round(link_gb_per_s, 2),
        "vram_cap_gib": vram_cap_gib,
    }


def artifact(
    name: str, machine: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The artifact of `rows` as measured by this process, now.

    Raises:
        ValueError: as `row`; `machine` has other keys than it should.
    """
    if set(machine) != set(_MACHINE):
        raise ValueError(f"machine has {sorted(machine)}; wanted {sorted(_MACHINE)}")
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "command": command_line(sys.argv),
        "machine": dict(machine),
        "versions": _versions(),
        "rows": [row(r["case"], r["metric"], r["value"]) for r in rows],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write what `artifact` made; the file is replaced whole or left as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """An artifact, checked as it was when it was written.

    Raises:
        ValueError: the file is none.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or tuple(content) != _KEYS:
        raise ValueError(f"{path} is no validation artifact: wanted the keys {', '.join(_KEYS)}")
    for given in content["rows"]:
        if given != row(given["case"], given["metric"], given["value"]):
            raise ValueError(f"{path}: {given} has another unit or more keys than it should")
    return content


def table(rows: Iterable[Mapping[str, Any]], cases: Sequence[str], metrics: Sequence[str]) -> str:
    """A markdown table: a line for each combination of the `cases` keys, a column for each metric.

    Lines keep the order of `rows`; a cell without a value is empty. Every column is as wide as its
    widest cell, so that a terminal shows it straight.

    Raises:
        ValueError: two values for one cell (the `cases` do not tell the rows apart), or none.
    """
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for given in rows:
        if given["metric"] not in metrics:
            continue
        key = tuple(given["case"].get(name, "") for name in cases)
        cells = lines.setdefault(key, {})
        if given["metric"] in cells:
            raise ValueError(
                f"two values of {given['metric']} for {dict(zip(cases, key, strict=True))}"
            )
        cells[given["metric"]] = given["value"]
    if not lines:
        raise ValueError(f"no row has one of the metrics {', '.join(metrics)}")
    body = [
        [*map(str, key), *(_number(cells[m]) if m in cells else "" for m in metrics)]
        for key, cells in lines.items()
    ]
    shown = [[*cases, *metrics], *body]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    rule = ["-" * width for width in widths[: len(cases)]]
    rule += ["-" * (width - 1) + ":" for width in widths[len(cases) :]]
    aligned = [
        [
            cell.ljust(width) if i < len(cases) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        for cells in shown
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [aligned[0], rule, *aligned[1:]])


def command_line(argv: Sequence[str]) -> str:
    """`argv` without the folders of this machine.

    Of the program, and of every path that is absolute or goes through `~` or `..`, only the last
    part is kept; a package that ran as `python -m` is named by its folder.
    """
    program, *arguments = argv
    path = Path(program)
    shown = [path.parent.name if path.name == "__main__.py" else path.name]
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        path = Path(value)
        if path.is_absolute() or value.startswith("~") or ".." in path.parts:
            value = path.name
        shown.append(f"{option}{equals}{value}")
    return shlex.join(shown)


def _check_case(key: str, given: Any) -> None:
    if key not in _CASE:
        raise ValueError(f"case key {key!r} is unknown; known: {', '.join(_CASE)}")
    wanted = _CASE[key]
    if isinstance(wanted, tuple):
        fits = type(given) in wanted
        text = "a number of type " + wanted[0].__name__
    elif isinstance(wanted, set):
        fits, text = given in wanted, f"one of {', '.join(sorted(wanted))}"
    else:
        fits = isinstance(given, str) and wanted.fullmatch(given) is not None
        text = "<batch>x<sequence>"
    if not fits:
        raise ValueError(f"case {key}: {given!r} is not canonical; wanted {text}")


def _commit() -> str:
    """POROS_COMMIT (a copy of a checkout does not know), else git's HEAD, else `unknown`."""
    if given := os.environ.get("POROS_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[1]
    # An installed package may lie inside somebody else's repository, whose commit says nothing.
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "HEAD")
    if top is None or head is None or Path(top) != root:
        return "unknown"
    return f"{head}-dirty" if _git(root, "status", "--porcelain", "-uno") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": hardware.torch_cuda()}
    found |= hardware.package_versions()
    return {name: version for name, version in found.items() if version is not None}


def _number(value: float) -> str:
    """Four significant digits, whole numbers whole."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
