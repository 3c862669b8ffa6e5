"""`poros train`: run what a run file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poros.cli.quiet import quieten
from poros.config import read_config
from poros.hardware import require_packages


def train(
    run: Annotated[Path, typer.Argument(help="Run file, such as `poros init` writes.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's."),
    ] = None,
) -> None:
    """Fine-tune as the run file says, or resume the run that its output folder holds."""
    config = read_config(run, overrides or ())
    require_packages()
    quieten()
    from poros import api

    api.train(config)
