"""`poros bench`: what streaming costs on this machine, beside the same model held whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from poros.cli.quiet import quieten
from poros.errors import ConfigError, OutputError, PorosError
from poros.hardware import require_packages
from poros.validation import table

SHOWN = (
    "step_ms",
    "peak_driver_gib",
    "loads_per_step",
    "link_used_gb_per_s",
    "ratio_to_resident",
    "ratio_to_peft",
)


def bench(
    shape: Annotated[
        str, typer.Option(help="A known model, or a transformers config as JSON text.")
    ] = "qwen2.5-7b",
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxLENGTH",
            help="Tokens of a step; may be repeated.",
            show_default="1x512, 8x512",
        ),
    ] = None,
    slots: Annotated[
        list[int] | None,
        typer.Option(help="Slots to stream through; may be repeated.", show_default="2"),
    ] = None,
    program: Annotated[
        list[str] | None,
        typer.Option(help="streamed, resident or peft; may be repeated.", show_default="all three"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each program.")] = 10,
    blocks: Annotated[int | None, typer.Option(help="Blocks, if not the model's own.")] = None,
    quantization: Annotated[
        Literal["nf4", "bf16"], typer.Option(help="Precision of the frozen base.")
    ] = "nf4",
    device: Annotated[
        Literal["auto", "cuda", "cpu"], typer.Option(help="Where to train.")
    ] = "auto",
    limit: Annotated[
        float | None, typer.Option(help="Seconds after which nothing new is measured.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--json", help="Validation JSON to write, renewed after every result."),
    ] = None,
) -> None:
    """Time a streamed model of random weights beside resident ones: step, peak, link use.

    resident: the same program with a slot for every block.
    peft: PEFT and bitsandbytes without Poros.
    Both hold the whole base on the device; without room: --program streamed.
    """
    require_packages()
    if out is not None:
        _check_writable(out)
    quieten()
    from poros.bench import PROGRAMS
    from poros.bench import bench as measure

    found = measure(
        _read_json(shape) if shape.lstrip().startswith("{") else shape,
        tokens=tokens or ("1x512", "8x512"),
        slots=slots or (2,),
        programs=program or PROGRAMS,
        num_blocks=blocks,
        quantization=quantization,
        num_steps=steps,
        device=device,
        limit_s=limit,
        out=out,
        log=typer.echo,
    )
    if not found["rows"]:
        raise PorosError(f"nothing was measured within {limit} s: raise --limit")
    measured = {row["metric"] for row in found["rows"]}
    metrics = [name for name in SHOWN if name in measured]
    typer.echo(table(found["rows"], ["tokens", "program", "block_size"], metrics))


def _read_json(text: str) -> dict[str, object]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--shape: not valid JSON: {error}") from None
    assert isinstance(config, dict)  # it begins with a brace
    return config


def _check_writable(out: Path) -> None:
    """Find out before minutes of measuring, not after them."""
    folder = out.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--json {out}: {folder} cannot be made: {error.strerror}") from None
    if out.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"--json {out}: wanted a file in a folder that can be written")
