"""`poros plan`: what fits, by arithmetic on the model's shape alone."""

from __future__ import annotations

from typing import Annotated

import typer

from poros.config import make_config
from poros.plan import fit_table, make_plan
from poros.shapes import read_model_shape
from poros.units import format_bytes, parse_size


def plan(
    model: Annotated[str, typer.Option("-m", "--model", help="Hub id or folder of the base.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings as in a run file."),
    ] = None,
    vram: Annotated[str | None, typer.Option(help="VRAM to fit into, such as 12GB.")] = None,
) -> None:
    """Show what a model needs: peak VRAM, slots, step time and host memory, with the terms."""
    # A plan needs no data, which a run file must name.
    values = {"model": model, "data": "none", "vram": vram}
    config = make_config(values, overrides or (), source="these settings")
    limit = None if config.vram is None else parse_size(config.vram)
    shape = read_model_shape(config.model, config.revision)
    options = config.plan_options()
    typer.echo("\n".join(make_plan(shape, vram_bytes=limit, **options).lines()))
    if limit is None:
        typer.echo("cards, with as many slots as fit:")
        for row in fit_table(shape, **options):
            found = "does not fit"
            if row.plan is not None:
                blocks = f"{row.plan.num_slots} of {shape.num_blocks} blocks"
                found = f"{blocks}, driver-level peak {format_bytes(row.plan.driver_bytes)}"
            typer.echo(f"  {row.vram_gb:>3} GB  {found}")
