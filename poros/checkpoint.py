"""The folder of a run: who may write there, where a stopped run goes on.

A run is recorded in `run.json` (settings, versions, every automatic choice, whether it finished)
before its first step. A folder with anything else in it is never written to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from poros.config import RunConfig
from poros.errors import ModelError, OutputError
from poros.hardware import package_versions
from poros.shapes import read_safetensors_header
from poros.units import MIB, format_bytes

RECORD = "run.json"
# Settings of where and how the same thing is learned and reported: a resumed run may change them.
# (Another device rounds otherwise, and an evaluation draws from the generator that dropout uses.)
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
        self._before: dict[str, Any] = {}  # the record of the run that is resumed

    def open(self) -> Path | None:
        """The checkpoint to go on from, None for a new run. Writes nothing.

        Raises:
            OutputError: the folder holds a finished run, another run, or no run at all.
        """
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise OutputError(f"output {self.path} is a file; name a folder that is new or empty")
        try:
            if not any(self.path.iterdir()):
                return None
        except OSError as error:
            raise OutputError(f"output {self.path} cannot be read: {error.strerror}") from None
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
        self._before = record
        return self.last_checkpoint()

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint in the folder.

        Raises:
            OutputError: it is damaged.
        """
        found = []
        for path in self.path.glob("checkpoint-*"):
            number = path.name.rpartition("-")[2]
            # The trainer writes its state last: a checkpoint without it was cut short.
            if number.isdigit() and (path / "trainer_state.json").is_file():
                found.append((int(number), path))
        if not found:
            return None
        found.sort()
        newest = found[-1][1]
        if fault := _fault(newest):
            before = f"from {found[-2][1].name}" if len(found) > 1 else "from its start"
            raise OutputError(
                f"checkpoint {newest} is damaged: {fault}\n"
                f"remove that folder: the same command then goes on {before}"
            )
        return newest

    def check_space(self, adapter_bytes: int) -> None:
        """Room for the adapter and up to three checkpoints (weights, two moments in fp32).

        Raises:
            OutputError: the disk has less free, or the folder cannot be written.
        """
        needed = adapter_bytes * (1 + 3 * 3)
        parent = self.path.absolute()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise OutputError(f"output {self.path} cannot be made: {parent} is a file")
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OutputError(
                f"output {self.path}: the disk has {format_bytes(free)} free and the run may write"
                f" {format_bytes(needed)}; free some space or name an output on another disk"
            )
        if not os.access(parent, os.W_OK):
            raise OutputError(f"output {self.path} cannot be written: no permission in {parent}")

    def start(self, choices: dict[str, Any], data: list[str]) -> None:
        """Create the folder and record the run, its automatic `choices` and what its `data` is.

        Raises:
            OutputError: the run that is resumed began with other data, or nothing can be written.
        """
        began = self._before.get("data", data)
        if began != data:
            raise OutputError(
                f"output {self.path} holds a run that began with other data:\n  "
                + "\n  ".join(["there:", *began, "now:", *data])
                + "\nname another output, or put the data back to resume it"
            )
        record = {
            "config": self.config.model_dump(mode="json"),
            "started": self._before.get("started", _now()),
            "finished": None,
            "versions": package_versions(),
            "data": data,
            "choices": choices,
        }
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write(record)
        except OSError as error:
            raise OutputError(f"output {self.path} cannot be written: {error.strerror}") from None

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Turn a disk that fills up during the run into an error that says what is left.

        Raises:
            OutputError: it did; the last checkpoint and what to do.
        """
        try:
            yield
        except Exception as error:
            # torch and safetensors report a failed write in words of their own.
            free = shutil.disk_usage(self.path).free if self.path.exists() else None
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if not full and (free is None or free > 16 * MIB):
                raise
            last = self.last_checkpoint()
            raise OutputError(
                f"output {self.path}: the disk is full; the last whole checkpoint is"
                f" {last.name if last is not None else 'none'}; free some space, then run the same"
                " command again to resume it"
            ) from error

    def finish(self, results: dict[str, Any]) -> None:
        """Mark the run as finished, with its `results`."""
        record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        self._write({**record, "finished": _now(), "results": results})

    def _write(self, record: dict[str, Any]) -> None:
        part = self.path / (RECORD + ".part")
        part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        part.replace(self.path / RECORD)


def _fault(checkpoint: Path) -> str | None:
    """The first damaged file of a checkpoint and what is wrong with it."""

    def check_json(file: Path) -> None:
        json.loads(file.read_text(encoding="utf-8"))

    def check_zip(file: Path) -> None:  # as torch.save writes: with a checksum for each part
        with zipfile.ZipFile(file) as archive:
            if broken := archive.testzip():
                raise ValueError(f"the checksum of {broken} is wrong")

    for name, check in (
        ("adapter_model.safetensors", read_safetensors_header),
        ("optimizer.pt", check_zip),
        ("scheduler.pt", check_zip),
        ("rng_state.pth", check_zip),
        ("trainer_state.json", check_json),
    ):
        try:
            check(checkpoint / name)
        except (ModelError, OSError, ValueError, zipfile.BadZipFile) as error:
            return f"{name}: {error}"
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
