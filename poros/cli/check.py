"""`poros check`: the run file, its output, its data rows and the fit, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poros import hardware
from poros.checkpoint import RunFolder
from poros.config import RunConfig, read_config
from poros.errors import HardwareError
from poros.plan import Plan, make_plan
from poros.rows import check_file
from poros.shapes import read_model_shape
from poros.units import parse_size


def check(
    run: Annotated[Path, typer.Argument(help="Run file, such as `poros init` writes.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's."),
    ] = None,
) -> None:
    """Check a run file: its settings, output, data rows, and whether the run fits."""
    config = read_config(run, overrides or ())
    folder = RunFolder(config)
    checkpoint = folder.open()
    goes_on = "is free" if checkpoint is None else f"holds this run, which goes on at {checkpoint}"
    typer.echo(f"{run}: every setting is valid; output {config.output} {goes_on}")
    for source in filter(None, (config.data, config.eval_data)):
        typer.echo(check_file(source, config.data_format))
    plan = _plan(config)
    folder.check_space(4 * plan.trainable_params)  # float32 adapters
    typer.echo("\n".join(plan.lines()))


def _plan(config: RunConfig) -> Plan:
    """The plan on this machine as nvidia-smi shows it: torch need not be there.

    Raises:
        HardwareError: the run asks for CUDA and no GPU is found.
        PorosOOMError: it does not fit.
    """
    gpus, _ = hardware.nvidia()
    if config.device == "cuda" and not gpus:
        raise HardwareError("device: found no NVIDIA GPU, wanted cuda; set device: auto or cpu")
    limits = [] if config.vram is None else [parse_size(config.vram)]
    if gpus and config.device != "cpu" and gpus[0].free_bytes is not None:
        limits.append(gpus[0].free_bytes)
    return make_plan(
        read_model_shape(config.model, config.revision),
        device="cuda" if gpus and config.device != "cpu" else "cpu",
        vram_bytes=min(limits, default=None),
        **config.plan_options(),
    )
