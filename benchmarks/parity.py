"""Train streamed and untouched resident models in lockstep and compare every bit after every step.

The reference is PEFT + bitsandbytes on the device with ordinary gradient checkpointing, in
deterministic mode. Each program owns its random state, so the dropout masks are the same exactly if
streaming draws the same numbers. Run from the repository: `python -m benchmarks.parity --help`.
Exit code 1 on any difference, and on a gradient that is zero everywhere: it would prove nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# cuBLAS reads it when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from poros import bench, validation
from poros.loader import pick_device

Random = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Arm:
    """One program and its random state; `ran` is what its latest step left to compare."""

    name: str
    program: bench.Program
    num_slots: int | None
    random: Random
    ran: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def step(self, ids: torch.Tensor) -> None:
        """Forward and backward, then clipping and the optimizer; fills `ran`."""
        program = self.program
        named = list(trained(program))
        set_random(program.device, self.random)
        loss, logits = program.backward(ids)
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=True)
        self.random = get_random(program.device)
        state = program.optimizer.state
        self.ran = {
            "loss": {"loss": loss},
            "logits": {"logits": logits},
            "gradients": gradients,
            "gradient_norm": {"gradient_norm": norm},
            "adapters": {name: p.detach() for name, p in named},
            "optimizer": {
                f"{name}.{key}": value for name, p in named for key, value in state[p].items()
            },
            "random_state": {
                str(i): part for i, part in enumerate(self.random) if part is not None
            },
        }


@dataclass
class Score:
    """What was compared so far on one surface. `worst` is None once it is no finite number."""

    equal: int = 0
    compared: int = 0
    worst: float | None = 0.0

    def add(self, ours: torch.Tensor | None, reference: torch.Tensor | None) -> bool:
        """Count one pair; a tensor that only one side has is a difference. True if equal."""
        self.compared += 1
        if ours is not None and reference is not None and torch.equal(ours, reference):
            self.equal += 1
            return True
        gap = float("inf")
        if ours is not None and reference is not None and ours.shape == reference.shape:
            gap = float((ours.double() - reference.double()).abs().max())
        self.worst = max(self.worst, gap) if self.worst is not None and gap < float("inf") else None
        return False


def trained(program: bench.Program) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and adapters."""
    return ((n, p) for n, p in program.model.named_parameters() if p.requires_grad)


def get_random(device: torch.device) -> Random:
    """Random state of the CPU and of a CUDA device."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def set_random(device: torch.device, state: Random) -> None:
    """Put back what `get_random` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare streamed and resident training bit by bit"
    )
    parser.add_argument("--shape", default="qwen2.5-7b", help="a known model or a config as JSON")
    parser.add_argument("--blocks", type=int, help="number of blocks, if not the model's own")
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=5, help="steps for each of --tokens")
    parser.add_argument("--tokens", nargs="+", default=["1x512"], help="<batch>x<sequence>")
    parser.add_argument("--quantization", choices=("nf4", "bf16"), default="nf4")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--poison", action="store_true", help="fill slots with NaN at each release")
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="a second resident model: is the reference stable?",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, help="seconds after which no new step begins")
    parser.add_argument("--out", type=Path, help="validation JSON, written after every step")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 if every bit was equal, else 1."""
    say = functools.partial(print, flush=True)
    args = arguments(argv)
    deadline = time.monotonic() + args.limit if args.limit else float("inf")
    shape: Any = json.loads(args.shape) if args.shape.startswith("{") else args.shape
    device = pick_device(args.device)
    torch.use_deterministic_algorithms(True)

    def make(name: str, kind: str, slots: int | None) -> Arm:
        start = time.monotonic()
        program = bench.build(
            kind,
            shape,
            num_slots=slots,
            num_blocks=args.blocks,
            quantization=args.quantization,
            device=device,
            dropout=args.dropout,
            poison=args.poison,
        )
        torch.manual_seed(0)
        say(f"built {name} in {time.monotonic() - start:.1f} s")
        return Arm(name, program, slots, get_random(device))

    reference = make("reference", "peft", None)
    arms = [make(f"{count} slots", "streamed", count) for count in args.slots]
    if args.self_check:
        arms.append(make("self-check", "peft", None))
    common = {
        "model": shape if isinstance(shape, str) else "custom",
        "quantization": args.quantization,
        "lora": "all-linear",
        "lora_rank": bench.LORA_RANK,
        "lora_dropout": args.dropout,
        "compute": "exact",
    }
    if args.blocks is not None or not isinstance(shape, str):
        common["num_blocks"] = int(bench.model_config(shape, args.blocks)["num_hidden_layers"])
    machine = validation.machine(None)
    finished: list[dict[str, Any]] = []
    failed = False
    for tokens in args.tokens:
        scores: list[dict[str, Score]] = [{} for _ in arms]
        rows: list[dict[str, Any]] = []
        for number in range(args.steps):
            if time.monotonic() > deadline:
                say(f"{tokens}: the time is up after {number} of {args.steps} steps")
                break
            ids = bench.random_ids(tokens, shape, device, seed=number)
            reference.step(ids)
            missing = [
                n for n, _ in trained(reference.program) if n not in reference.ran["gradients"]
            ]
            zero = [n for n, g in reference.ran["gradients"].items() if not bool(g.any())]
            if vacuous := [*missing, *zero]:
                say(f"the reference has no gradient at {len(vacuous)} adapters: {vacuous[:4]}")
                failed = True
            for arm, score in zip(arms, scores, strict=True):
                arm.step(ids)
                different = compare(arm, reference, score)
                failed |= bool(different)
                total = sum(part.compared for part in score.values())
                result = f"{len(different)} DIFFER: {different[:4]}" if different else "equal"
                loss = float(arm.ran["loss"]["loss"])
                say(
                    f"{tokens} step {number} {arm.name}: loss {loss:.6f}, {result} ({total} so far)"
                )
                arm.ran = {}
            reference.ran = {}
            rows = [
                entry
                for arm, score in zip(arms, scores, strict=True)
                for entry in as_rows(
                    arm, score, common | {"tokens": tokens, "num_steps": number + 1}
                )
            ]
            if args.out is not None:
                found = validation.artifact("parity", machine, finished + rows)
                validation.write(args.out, found)
        finished += rows
    if not finished:
        say("nothing was compared")
        return 1
    say("DIFFERENT" if failed else "equal in every bit")
    return int(failed)


def compare(arm: Arm, reference: Arm, scores: dict[str, Score]) -> list[str]:
    """Count every tensor of the latest step; the names of those that differ."""
    different = []
    for surface, wanted in reference.ran.items():
        score = scores.setdefault(surface, Score())
        for name in sorted(set(wanted) | set(arm.ran[surface])):
            if not score.add(arm.ran[surface].get(name), wanted.get(name)):
                different.append(f"{surface}: {name}")
    return different


def as_rows(arm: Arm, scores: dict[str, Score], case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The counts as rows of a validation artifact."""
    streamed = arm.num_slots is not None
    where = {"program": "streamed" if streamed else "peft"}
    if streamed:
        where |= {"block_size": arm.num_slots, "store": "ram"}
    for surface, score in scores.items():
        full = {**case, **where, "surface": surface}
        yield validation.row(full, "num_tensors_equal", score.equal)
        yield validation.row(full, "num_tensors", score.compared)
        if score.worst is not None:
            yield validation.row(full, "max_abs_diff", score.worst)


if __name__ == "__main__":
    sys.exit(main())
