"""The folder of a run: who may write there, where a stopped run goes on.

A run is recorded in `run.json` (settings, versions, every automatic choice, whether it finished)
before its first step. A folder with anything else in it is never written to.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from poros.config import RunConfig
from poros.errors import OutputError
from poros.hardware import package_versions
from poros.units import format_bytes

RECORD = "run.json"
# Settings that leave the result as it is, bit for bit, or only add to what is reported.
FREE_TO_CHANGE = {
    "block_size",
    "device",
    "eval_steps",
    "log_steps",
    "nf4_load_strategy",
    "output",
    "prompt",
    "save_steps",
    "vram",
}


class RunFolder:
    """`config.output` as a run: `open` decides between a new run, a resumed one and an error."""

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output)
        self.config = config

    def open(self) -> Path | None:
        """The checkpoint to go on from, None for a new run. Writes nothing.

        Raises:
            OutputError: the folder holds a finished run, another run, or no run at all.
        """
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise OutputError(f"output {self.path} is a file; name a folder that is new or empty")
        if not any(self.path.iterdir()):
            return None
        try:
            record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
            before = dict(record["config"])
        except (OSError, ValueError, KeyError, TypeError):
            raise OutputError(
                f"output {self.path} is not empty and holds no run of Poros; name a folder that is"
                " new or empty, such as output=./poros_output/other"
            ) from None
        now = self.config.model_dump(mode="json")
        changed = [
            f"{key}: {before.get(key)!r} there, {value!r} now"
            for key, value in now.items()
            if key not in FREE_TO_CHANGE and before.get(key) != value
        ]
        if changed:
            raise OutputError(
                f"output {self.path} holds another run, which differs in\n  "
                + "\n  ".join(changed)
                + "\nname another output, or set these back to resume it"
            )
        if record.get("finished"):
            raise OutputError(
                f"output {self.path} holds this run, finished on {record['finished']}; name another"
                " output to run it again, or remove the folder"
            )
        return self.last_checkpoint()

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint in the folder."""
        found = []
        for path in self.path.glob("checkpoint-*"):
            number = path.name.rpartition("-")[2]
            # The trainer writes its state last: a checkpoint without it was cut short.
            if number.isdigit() and (path / "trainer_state.json").is_file():
                found.append((int(number), path))
        return max(found)[1] if found else None

    def check_space(self, adapter_bytes: int) -> None:
        """Room for the adapter and up to three checkpoints (weights, two moments in fp32).

        Raises:
            OutputError: the disk has less free, or the folder cannot be written.
        """
        needed = adapter_bytes * (1 + 3 * 3)
        parent = self.path.absolute()
        while not parent.exists():
            parent = parent.parent
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OutputError(
                f"output {self.path}: the disk has {format_bytes(free)} free and the run may write"
                f" {format_bytes(needed)}; free some space or name an output on another disk"
            )
        if not os.access(parent, os.W_OK):
            raise OutputError(f"output {self.path} cannot be written: no permission in {parent}")

    def start(self, choices: dict[str, Any]) -> None:
        """Create the folder and record the run and its automatic `choices`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"output {self.path} cannot be made: {error.strerror}") from None
        self._write(
            {
                "config": self.config.model_dump(mode="json"),
                "started": _now(),
                "finished": None,
                "versions": package_versions(),
                "choices": choices,
            }
        )

    def finish(self, results: dict[str, Any]) -> None:
        """Mark the run as finished, with its `results`."""
        record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        self._write({**record, "finished": _now(), "results": results})

    def _write(self, record: dict[str, Any]) -> None:
        part = self.path / (RECORD + ".part")
        part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        part.replace(self.path / RECORD)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
