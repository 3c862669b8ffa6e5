"""`poros train`: run what a run file describes."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

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
    _quieten()
    from poros import api

    api.train(config)


def _quieten() -> None:
    """Keep the libraries' notices to developers, and progress bars in log files, off the screen."""
    # On import it reports that an optional CPU kernel is not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
