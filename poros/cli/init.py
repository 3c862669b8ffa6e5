"""`poros init`: write a run file with every setting visible."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poros.config import write_config


def init(
    path: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    model: Annotated[str, typer.Option("-m", "--model", help="Hub id or folder of the base.")],
    data: Annotated[str, typer.Option("-d", "--data", help="Hub dataset id, or a local file.")],
) -> None:
    """Write a run file with every default visible."""
    write_config(path, model=model, data=data)
    typer.echo(f"wrote {path}\nnext: poros check {path}")
