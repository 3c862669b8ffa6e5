"""What went wrong, in which words.

Every mistake a user can make ends in a `PorosError`: its text says what was found, what was
wanted and what to do, with names. The command line turns it into one message and its exit code;
anything else that escapes is a bug of Poros and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping

from poros.units import format_bytes


class PorosError(Exception):
    """Base of every error a user can cause or mend; `exit_code` is that of the command line."""

    exit_code = 2


class ConfigError(PorosError):
    """A configuration that cannot be run; lists every fault at once."""


class DataError(PorosError):
    """A dataset, file or row that cannot be trained on."""


class ModelError(PorosError):
    """A model or checkpoint that cannot be found, loaded or streamed."""


class OutputError(PorosError):
    """An output folder that must not or cannot be written."""


class HardwareError(PorosError):
    """A device that was asked for and is not there."""


class StreamError(PorosError):
    """A tripwire: a slot held other bytes than the block asked for, or the base was written."""

    exit_code = 1


class PorosOOMError(PorosError):
    """Memory that did not suffice: what was needed, what was free, the terms, what to change.

    `terms` maps the name of each part of the sum to its size in bytes.
    """

    def __init__(
        self,
        what: str,
        *,
        needed: int | None = None,
        free: int | None = None,
        terms: Mapping[str, int] | None = None,
        advice: str = "",
    ) -> None:
        self.needed, self.free, self.terms, self.advice = needed, free, dict(terms or {}), advice
        lines = [what]
        if needed is not None and free is not None:
            short = max(needed - free, 0)
            lines.append(
                f"needed {format_bytes(needed)}, free {format_bytes(free)}"
                f" ({format_bytes(short)} short)"
            )
        lines += [f"  {name:<28} {format_bytes(size):>10}" for name, size in self.terms.items()]
        if advice:
            lines.append(f"next: {advice}")
        super().__init__("\n".join(lines))
