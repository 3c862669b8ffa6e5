"""Write what the documentation takes from the code and from measurements: `make docs`.

docs/cli.md is typer's own description of the command line. A table of figures stands between
`<!-- table: FILE; CASES; METRICS -->` and `<!-- end -->`: FILE is a validation artifact, CASES are
the keys that tell the lines apart, METRICS the columns. A case `key=value` takes only such rows and
has no column.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from poros.validation import read, table

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- table: (.+?); (.+?); (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every page of the documentation but the log, which speaks of the past."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page != ROOT / "docs" / "log.md"]


def generated() -> dict[Path, str]:
    """The text that each page should have.

    Raises:
        ValueError: a marked table cannot be made: its text says of which page.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    texts[ROOT / "docs" / "cli.md"] = command_line()
    return {page: with_tables(text, page) for page, text in texts.items()}


def with_tables(text: str, page: Path) -> str:
    """`text` with every marked table made anew."""

    def made(found: re.Match[str]) -> str:
        begin, file, cases, metrics, end = found.groups()
        try:
            filled = figures(ROOT / file, cases.split(", "), metrics.split(", "))
        except (OSError, ValueError) as error:
            raise ValueError(f"{page.name}: {begin.strip()}: {error}") from error
        return f"{begin}\n{filled}\n\n{end}"

    return MARKED.sub(made, text)


def figures(file: Path, cases: list[str], metrics: list[str]) -> str:
    """The table of one artifact."""
    fixed = dict(case.split("=") for case in cases if "=" in case)
    rows = [
        row
        for row in read(file)["rows"]
        if all(str(row["case"].get(key)) == value for key, value in fixed.items())
    ]
    return table(rows, [case for case in cases if "=" not in case], metrics)


def command_line() -> str:
    """Every command with its arguments and options."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "poros.cli", "utils", "docs", "--name", "poros"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return f"<!-- made by `make docs` -->\n\n{made.strip()}\n"


if __name__ == "__main__":
    for page, text in generated().items():
        page.write_text(text, encoding="utf-8")
