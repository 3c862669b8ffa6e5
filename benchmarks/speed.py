"""Step time, peak memory and link use of streamed and resident training, written as raw JSON.

Run from the repository: `python -m benchmarks.speed --help`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from poros.bench import PROGRAMS, bench
from poros.validation import table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Time streamed and resident training")
    parser.add_argument("--shape", default="qwen2.5-7b", help="a known model or a config as JSON")
    parser.add_argument("--blocks", type=int, help="number of blocks, if not the model's own")
    parser.add_argument("--tokens", nargs="+", default=["1x512", "8x512"])
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--quantization", choices=("nf4", "bf16"), default="nf4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, help="seconds after which nothing new is measured")
    parser.add_argument("--out", type=Path, help="validation JSON, written after every result")
    args = parser.parse_args(argv)
    found = bench(
        json.loads(args.shape) if args.shape.startswith("{") else args.shape,
        tokens=args.tokens,
        slots=args.slots,
        programs=args.programs,
        num_blocks=args.blocks,
        quantization=args.quantization,
        num_steps=args.steps,
        num_warmup=args.warmup,
        device=args.device,
        limit_s=args.limit,
        out=args.out,
        log=functools.partial(print, flush=True),
    )
    if found["rows"]:
        metrics = list(dict.fromkeys(row["metric"] for row in found["rows"]))
        print(table(found["rows"], ["tokens", "program", "block_size"], metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
