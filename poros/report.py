"""What a person sees of a run while it goes, and what the run folder keeps of it."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from poros.core.attach import Streamed
from poros.errors import PorosError
from poros.units import GIB, format_seconds


def peak_memory(device: torch.device) -> tuple[str, float]:
    """(what was measured, GiB): the allocator's peak on a GPU, the process's peak on the CPU."""
    if device.type == "cuda":
        return "VRAM", torch.cuda.max_memory_allocated(device) / GIB
    if sys.platform == "win32":
        return "RAM", psutil.Process().memory_info().peak_wset / GIB
    import resource  # not on Windows

    return "RAM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class Progress(TrainerCallback):
    """One live line (a line a log step where there is no terminal) and `metrics.jsonl`.

    Link use is the bytes copied into slots over the time since the last log, in 1e9 bytes a second.
    """

    def __init__(
        self, console: Console, device: torch.device, streamed: Streamed | None, folder: Path | None
    ) -> None:
        self._console, self._device, self._streamed = console, device, streamed
        self._metrics = folder / "metrics.jsonl" if folder is not None else None
        self._live: Live | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock and, on a terminal, the live line."""
        self._begin = self._last = time.monotonic()
        self._first_step = self._last_step = state.global_step
        self._tokens = 0.0
        self._bytes = self._copied()
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the live line as it is from here on."""
        self.close()

    def close(self) -> None:
        """Leave the live line as it is from here on."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Show and keep one row of the log; a loss that is not finite ends the run."""
        logs = logs or {}
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                self.close()
                raise PorosError(
                    f"the loss became {logs['loss']} at step {state.global_step}; lower"
                    " learning_rate or max_grad_norm, and start again with another output"
                )
            self._show(state, logs)
        elif "eval_loss" in logs and 0 < state.global_step < state.max_steps:
            self._print(f"step {state.global_step}  held-out loss {logs['eval_loss']:.4f}")
        if self._metrics is not None:
            row = {"step": state.global_step, "time": round(time.time(), 3), **logs}
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _copied(self) -> int:
        return self._streamed.stream.stats.loaded_bytes if self._streamed is not None else 0

    def _show(self, state: TrainerState, logs: dict[str, float]) -> None:
        now = time.monotonic()
        steps = state.global_step - self._last_step
        seconds = max(now - self._last, 1e-9)
        tokens = float(logs.get("num_tokens", self._tokens))
        left = (state.max_steps - state.global_step) * (now - self._begin)
        left /= max(state.global_step - self._first_step, 1)
        copied = self._copied()
        what, peak = peak_memory(self._device)
        parts = [
            f"step {state.global_step}/{state.max_steps}",
            f"loss {logs['loss']:.4f}",
            f"{(tokens - self._tokens) / seconds:,.0f} tok/s",
            f"{format_seconds(seconds / max(steps, 1))}/step",
            f"ETA {format_seconds(left) if left else '0s'}",
            f"peak {what} {peak:.2f} GiB",
        ]
        if self._streamed is not None:
            parts.append(f"link {(copied - self._bytes) / seconds / 1e9:.2f} GB/s")
        self._last, self._last_step, self._tokens, self._bytes = (
            now,
            state.global_step,
            tokens,
            copied,
        )
        line = "  ".join(parts)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)
