"""The command line: parse, call the API, print.

A `PorosError` becomes its message on stderr and its exit code, here and nowhere else; any other
exception is a bug of Poros and keeps its traceback.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import poros
from poros.cli.bench import bench
from poros.cli.check import check
from poros.cli.doctor import doctor
from poros.cli.init import init
from poros.cli.plan import plan
from poros.cli.train import train
from poros.errors import PorosError


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PorosError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    name="poros",
    cls=_Group,
    help="Fine-tune LoRA adapters while the frozen base streams from host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (doctor, init, check, train, plan, bench):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"poros {poros.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `poros` command."""
    app()
