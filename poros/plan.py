"""The arithmetic: sizes in, slots, predicted peak and step time out.

Each term of the sum is a function of its own. Packed blocks, adapters, optimizer state and
boundaries are exact; what a block's backward and the loss keep alive is an estimate whose formula
its docstring gives. A training step has three moments that can be its peak (the backward of a
block, the loss, the optimizer); the plan sums each and reports the largest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from poros.errors import ConfigError, PorosOOMError
from poros.shapes import NORM, BlockShape, Matrix, ModelShape
from poros.units import GIB, MIB, format_bytes, format_seconds

Quantization = Literal["nf4", "bf16", "int8"]

ALIGN = 256
"""Every tensor of a packed block starts at a multiple of this many bytes."""
NF4_BLOCK = 64
"""Weights that share one absmax (bitsandbytes `blocksize`)."""
NF4_NESTED_BLOCK = 256
"""Absmax values that share one nested absmax."""
LOSS_TOKENS, LOSS_VOCAB = 4096, 32768
"""Tile of TRL's fused head: `TOKEN_CHUNK_SIZE` in trl.kernels.chunked_logprob and
`_CHUNKED_LOGPROB_CHUNK_SIZE` in trl.trainer.utils."""
CUBLAS_BYTES = 64 * MIB
"""Estimate: workspaces of cuBLAS and cuBLASLt, held by torch's allocator (32 MiB each on Hopper,
less on older cards)."""
CUDA_CONTEXT_BYTES = GIB // 2
"""Estimate: context, kernels and library handles of one process, outside torch's allocator."""
ALLOCATOR_SLACK = 0.05
"""Estimate: share of the peak that torch's caching allocator reserves beyond what it hands out."""
PROCESS_BYTES = 3 * GIB
"""Estimate: host memory of Python, torch, CUDA libraries and the data loader."""
UNASKED_SLOTS = 4
"""Slots of `auto` on a card whose free memory is not known."""
CPU_SLOTS = 2
"""Slots of `auto` on the CPU: there a slot is a second copy in the same memory, so more slots only
cost."""


# --- bytes --------------------------------------------------------------------------------------


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def matrix_bytes(numel: int, rows: int, quantization: Quantization) -> Iterator[int]:
    """Bytes of each tensor that stores one matrix of `numel` weights and `rows` output features.

    nf4 with double quantisation: two weights a byte; an absmax of 8 bits for every 64 weights; a
    float32 for every 256 of those; one float32 offset. int8: a byte a weight, a float32 scale a
    row. bf16: two bytes a weight.
    """
    if quantization == "nf4":
        absmax = -(-numel // NF4_BLOCK)
        yield from (-(-numel // 2), absmax, 4 * -(-absmax // NF4_NESTED_BLOCK), 4)
    elif quantization == "int8":
        yield from (numel, 4 * rows)
    else:
        yield 2 * numel


@lru_cache(maxsize=1024)
def packed_block_bytes(
    block: BlockShape, quantization: Quantization, compute_bytes: int = 2
) -> int:
    """Bytes of one packed block, each tensor padded to `ALIGN`.

    What is not quantised takes `compute_bytes` an element.
    """
    total = sum(_aligned(compute_bytes * size) for _, size in block.others)
    for matrix in block.matrices:
        parts = matrix_bytes(matrix.numel, matrix.out_features, quantization)
        total += sum(_aligned(part) for part in parts)
    return total


def slot_bytes(shape: ModelShape, quantization: Quantization, compute_bytes: int = 2) -> int:
    """Bytes of one slot: the largest packed block."""
    return max(packed_block_bytes(b, quantization, compute_bytes) for b in shape.kinds)


def store_bytes(shape: ModelShape, quantization: Quantization, compute_bytes: int = 2) -> int:
    """Bytes of all packed blocks."""
    return sum(
        packed_block_bytes(b, quantization, compute_bytes) * n for b, n in shape.kinds.items()
    )


def resident_bytes(shape: ModelShape, compute_bytes: int = 2) -> int:
    """Bytes of embeddings, head and final norm, which stay on the device unquantised."""
    return shape.resident_params * compute_bytes


def targeted_matrices(
    shape: ModelShape, target_modules: str | Sequence[str]
) -> tuple[tuple[Matrix, ...], ...]:
    """The matrices of each block that get an adapter.

    As PEFT reads it: `all-linear`; a list of names, each matching the end of a module's name; a
    string, one name or a regular expression for the whole module name
    (`model.layers.3.self_attn.q_proj`).

    Raises:
        ConfigError: the expression is not valid, or nothing matches.
    """
    found = _targeted(shape, _frozen(target_modules))
    if not any(found):
        names = sorted({m.name.rsplit(".", 1)[-1] for b in shape.kinds for m in b.matrices})
        asked = [target_modules] if isinstance(target_modules, str) else list(target_modules)
        near = [n for a in asked for n in difflib.get_close_matches(a, names, n=1)]
        raise ConfigError(
            f"target_modules {', '.join(asked) or '(empty)'} matches no matrix of {shape.name}"
            + (f" (did you mean {', '.join(near)}?)" if near else "")
            + f": its blocks have {', '.join(names)}; all-linear takes all of them"
        )
    return found


def _frozen(target_modules: str | Sequence[str]) -> str | tuple[str, ...]:
    return target_modules if isinstance(target_modules, str) else tuple(target_modules)


@lru_cache(maxsize=64)
def _targeted(shape: ModelShape, targets: str | tuple[str, ...]) -> tuple[tuple[Matrix, ...], ...]:
    if targets == "all-linear":
        return tuple(block.matrices for block in shape.blocks)
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets) and ".*" not in targets:
        targets = (targets,)
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ConfigError(f"target_modules {targets!r} is no expression: {error}") from None
        return tuple(
            tuple(m for m in b.matrices if pattern.fullmatch(f"{shape.block_prefix}.{i}.{m.name}"))
            for i, b in enumerate(shape.blocks)
        )
    ends = tuple(f".{name}" for name in targets)
    return tuple(
        tuple(m for m in b.matrices if f"{shape.block_prefix}.{i}.{m.name}".endswith(ends))
        for i, b in enumerate(shape.blocks)
    )


def lora_params(shape: ModelShape, rank: int, target_modules: str | Sequence[str]) -> int:
    """Trainable elements: `rank * (in + out)` for every targeted matrix."""
    return sum(
        rank * (m.in_features + m.out_features)
        for block in targeted_matrices(shape, target_modules)
        for m in block
    )


_STATE_BYTES = {
    "adamw": 8.0,
    "adafactor": 0.0,  # a row and a column a matrix: below one percent of the adapter
    "ademamix": 12.0,
    "adagrad": 4.0,
    "lion": 4.0,
    "rmsprop": 4.0,
    "sgd": 0.0,
}


def optimizer_state_bytes(optimizer: str, num_params: int, adapter_bytes: int = 4) -> int | None:
    """Bytes of the state of an optimizer by its transformers name; None when it is not known.

    Moments have the dtype of the adapters: AdamW 8 bytes an element in float32; `8bit` keeps a
    byte for each of them and a float32 for every 256.
    """
    name = optimizer.lower().removeprefix("paged_")
    per_element = _STATE_BYTES.get(re.split(r"_", name)[0])
    if per_element is None or "4bit" in name:
        return None
    if "8bit" in name:
        return round(per_element / 4 * (1 + 4 / 256) * num_params)
    return round(per_element / 4 * adapter_bytes * num_params)


def optimizer_step_bytes(optimizer: str, num_params: int, adapter_bytes: int = 4) -> int:
    """Bytes that one optimizer step allocates.

    torch's multi-tensor AdamW (`adamw_torch`) holds the square roots of all second moments at
    once; the fused one and those of bitsandbytes allocate nothing.
    """
    return adapter_bytes * num_params if optimizer == "adamw_torch" else 0


def boundary_bytes(shape: ModelShape, tokens: int, compute_bytes: int = 2) -> int:
    """Bytes of the hidden states saved at the input of every block, for all tokens of the batch."""
    return shape.num_blocks * tokens * shape.hidden_size * compute_bytes


def workspace_bytes(shape: ModelShape, quantization: Quantization, compute_bytes: int = 2) -> int:
    """Bytes of the largest matrix, dequantised for its matmul; for nf4 with its float32 absmax."""
    if quantization == "bf16":
        return 0
    numel = max((m.numel for b in shape.kinds for m in b.matrices), default=0)
    absmax = 4 * -(-numel // NF4_BLOCK) if quantization == "nf4" else 0
    return compute_bytes * numel + absmax


def saved_bytes(
    shape: ModelShape,
    tokens: int,
    target_modules: str | Sequence[str],
    *,
    rank: int = 16,
    seq_len: int = 512,
    quantization: Quantization = "nf4",
    device: Literal["cuda", "cpu"] = "cuda",
    compute_bytes: int = 2,
    autocast: bool = False,
    adapter_bytes: int = 4,
) -> int:
    """Bytes that autograd saves when a block is recomputed for `tokens` tokens; the largest block.

    Per token, with h hidden, i intermediate, q and k the widths of all query and key heads, and c
    bytes of the compute dtype:

    - norms: a float32 copy of the input of an RMSNorm (4h), the input of a LayerNorm (ch); with
      norms on query and key also 4(q + k);
    - attention: query, key, value and output (c(2q + 2k)), and c(q + k) that a fused projection
      keeps alive; eager attention keeps 8 bytes a score;
    - MLP: gate, its activation and up (3ci); ungated ci, or four times that where transformers
      writes the GELU out in single steps (`gelu_new`);
    - adapters: their bytes a rank, and the input of each, cast to their dtype by PEFT. Under
      autocast the copy is of c bytes, and on CUDA adapters on nf4 share the one that their layer
      was given (PEFT asks whether CUDA's autocast is on before it casts).
    """
    h, c, inter = shape.hidden_size, compute_bytes, shape.intermediate_size
    q, k = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    cast = c if autocast else adapter_bytes
    largest = 0
    targets = targeted_matrices(shape, target_modules)
    for block, targeted in set(zip(shape.blocks, targets, strict=True)):
        names = {name for name, _ in block.others}
        norms = [n for n, size in block.others if size == h and NORM.search(n)]
        saved = sum(c * h if n.replace("weight", "bias") in names else 4 * h for n in norms)
        saved += 4 * (q + k) if any("q_norm" in name for name in names) else 0
        saved += c * (2 * q + 2 * k)
        saved += c * (q + k) if any(m.out_features == q + 2 * k for m in block.matrices) else 0
        saved += 8 * shape.num_attention_heads * seq_len if shape.eager_attention else 0
        gated = any("gate" in name for name in [*names, *(m.name for m in block.matrices)])
        saved += (3 if gated else 4 if shape.activation == "gelu_new" else 1) * c * inter
        inputs = [(m.name.rpartition(".")[0], m.in_features) for m in targeted]
        shared = autocast and quantization == "nf4" and device == "cuda"
        saved += cast * sum(width for _, width in (set(inputs) if shared else inputs))
        largest = max(largest, saved + adapter_bytes * rank * len(targeted))
    return largest * tokens


def flight_bytes(shape: ModelShape, tokens: int, compute_bytes: int = 2) -> int:
    """Estimate of what a block's backward has in flight on top of what was saved.

    The block's input and output, their gradients and a sum of two, and a gradient of an adapter's
    input in float32: (5c + 4)h a token.
    """
    return tokens * shape.hidden_size * (5 * compute_bytes + 4)


def loss_bytes(
    shape: ModelShape, tokens: int, device: Literal["cuda", "cpu"], compute_bytes: int = 2
) -> dict[str, int]:
    """What TRL's fused head and loss hold for `tokens` tokens that all count.

    A tile of up to 4096 tokens by 32768 words, made into its own gradient in place; on the CPU,
    where the kernel is plain torch, six float32 copies of it as well. Of the last hidden state:
    the block's output, the final norm's float32 input and its output, the rows that count, and the
    gradient summed in float32.
    """
    rows = min(tokens, LOSS_TOKENS)
    tile = rows * LOSS_VOCAB * compute_bytes
    if device == "cpu":
        tile += 6 * 4 * rows * min(LOSS_VOCAB, shape.vocab_size)
        tile += 4 * min(LOSS_VOCAB, shape.vocab_size) * shape.hidden_size
    hidden = tokens * shape.hidden_size * (3 * compute_bytes + 8)
    return {"head and loss tile (estimate)": tile, "last hidden state (estimate)": hidden}


def loads_per_pass(num_blocks: int, num_slots: int) -> int:
    """Blocks copied for one forward and backward: the zig-zag turns around on what is held."""
    return 2 * (num_blocks - num_slots)


def step_flops(
    shape: ModelShape, tokens: int, seq_len: int, rank: int, target_modules: str | Sequence[str]
) -> int:
    """Floating-point operations of a forward and backward over `tokens` tokens.

    Two per weight and token; forward, recomputation and input gradient make three passes over the
    frozen base (and over the head, whose tiles are recomputed), four over the adapters. Attention:
    4 q seq per token and pass, halved by the causal mask, five passes (backward counts 2.5 and
    rounds up). Of experts, the active share.
    """
    base = sum(
        (b.num_params - b.expert_params * (1 - shape.active_expert_share)) * n
        for b, n in shape.kinds.items()
    )
    head = shape.vocab_size * shape.hidden_size
    q = shape.num_attention_heads * shape.head_dim
    attention = shape.num_blocks * 2 * q * seq_len * 5
    adapters = 8 * lora_params(shape, rank, target_modules)
    return round(tokens * (6 * base + 6 * head + adapters + attention))


# --- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a plan is asked for.

    Attributes:
        quantization: precision of the frozen base; int8 does not stream, so every block stays.
        block_size: slots, clamped to the number of blocks; `auto` fills `vram_bytes`.
        batch_size: rows of one forward.
        seq_len: tokens of a row.
        lora_rank: rank of every adapter.
        target_modules: see `targeted_matrices`.
        optimizer: a transformers optimizer name.
        vram_bytes: bytes the run may use on the device (on the CPU: besides the packed base);
            None: no limit, nothing is refused.
        device: where it trains.
        micro_rows: rows of the batch in a block at a time; None: all.
        gradient_accumulation_steps: forwards of one optimizer step; each copies the blocks anew.
        link_gb_per_s: host-to-device rate in 10**9 bytes a second, if measured.
        flops: floating-point operations a second that the device reaches, if known.
        compute_bytes: bytes an element of everything not quantised.
        adapter_bytes: bytes an element of adapters, their gradients and the optimizer's moments.
        autocast: whether the forward runs under autocast, so that adapters cast no inputs.
        context_bytes: driver memory still to come; 0 when `vram_bytes` was read after the CUDA
            context was made.
    """

    quantization: Quantization = "nf4"
    block_size: int | Literal["auto"] = "auto"
    batch_size: int = 1
    seq_len: int = 512
    lora_rank: int = 16
    target_modules: str | Sequence[str] = "all-linear"
    optimizer: str = "adamw_torch"
    vram_bytes: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    micro_rows: int | None = None
    gradient_accumulation_steps: int = 1
    link_gb_per_s: float | None = None
    flops: float | None = None
    compute_bytes: int = 2
    adapter_bytes: int = 4
    autocast: bool = False
    context_bytes: int = CUDA_CONTEXT_BYTES

    @property
    def rows(self) -> int:
        """Rows of the batch that are in a block at a time."""
        return min(self.micro_rows or self.batch_size, self.batch_size)


@dataclass(frozen=True)
class Plan:
    """What a run needs. Sizes in bytes, times in seconds.

    `phases` gives the sum of each moment that can be the peak; `phase` names the largest, `terms`
    is its sum and `peak_bytes` its total (what torch's allocator will have handed out).
    `driver_bytes` adds what the driver shows on top (`driver_terms`). `step_seconds` is a lower
    bound, max(compute, transfer); None when the link or the card's speed is not known.
    """

    shape: ModelShape
    job: Job
    trainable_params: int
    num_slots: int
    slots_reason: str
    slot_bytes: int
    phases: dict[str, dict[str, int]]
    driver_terms: dict[str, int]
    host_terms: dict[str, int]
    loads_per_step: int
    transfer_bytes_per_step: int
    compute_seconds: float | None
    transfer_seconds: float | None
    notes: tuple[str, ...]

    @property
    def phase(self) -> str:
        """The moment of the peak."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def terms(self) -> dict[str, int]:
        """The terms of the peak, by name."""
        return self.phases[self.phase]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of torch's allocator (on the CPU: memory besides the packed base)."""
        return sum(self.terms.values())

    @property
    def driver_bytes(self) -> int:
        """Predicted peak as the driver shows it."""
        return self.peak_bytes + sum(self.driver_terms.values())

    @property
    def host_bytes(self) -> int:
        """Predicted host memory."""
        return sum(self.host_terms.values())

    @property
    def fits(self) -> bool:
        """Whether `driver_bytes` is within the job's `vram_bytes`; true when no limit was given."""
        return self.job.vram_bytes is None or self.driver_bytes <= self.job.vram_bytes

    @property
    def step_seconds(self) -> float | None:
        """Lower bound of one optimizer step; None when it is not known."""
        if self.compute_seconds is None or self.transfer_seconds is None:
            return None
        return max(self.compute_seconds, self.transfer_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; the job under its own key, the model by name and counts."""
        job = asdict(self.job)
        if not isinstance(self.job.target_modules, str):
            job["target_modules"] = list(self.job.target_modules)
        found: dict[str, Any] = {
            "model": self.shape.name,
            "source": self.shape.source,
            "num_params": self.shape.num_params,
            "num_blocks": self.shape.num_blocks,
            "job": job,
        }
        found |= {f.name: getattr(self, f.name) for f in fields(self)[2:]}
        derived = ("phase", "peak_bytes", "driver_bytes", "host_bytes", "fits", "step_seconds")
        return found | {name: getattr(self, name) for name in derived} | {"notes": [*self.notes]}

    def lines(self) -> list[str]:
        """The plan as plain text, one line an entry."""
        job, shape, targets = self.job, self.shape, self.job.target_modules
        targets = targets if isinstance(targets, str) else ", ".join(targets)
        rows = f" ({job.rows} rows at a time)" if job.rows < job.batch_size else ""
        lines = [
            f"{shape.name}: {shape.num_params / 1e9:.2f}B parameters in {shape.num_blocks} blocks "
            f"({shape.source})",
            f"{job.quantization}, LoRA rank {job.lora_rank} on {targets} "
            f"({self.trainable_params / 1e6:.1f}M trainable), {job.optimizer}, "
            f"{job.batch_size} x {job.seq_len} tokens{rows}",
            f"slots: {self.num_slots} of {shape.num_blocks} blocks on the device "
            f"({self.slots_reason})",
        ]

        def table(terms: Mapping[str, int], total: str) -> None:
            width = max(map(len, [*terms, total])) + 2
            rows = [*terms.items(), (total, sum(terms.values()))]
            lines.extend(f"  {name:<{width}}{format_bytes(size):>10}" for name, size in rows)

        where = "device memory" if job.device == "cuda" else "memory"
        lines.append(f"{where} at its peak, in the {self.phase}:")
        table(self.terms, "predicted peak")
        if self.driver_terms:
            lines.append("as the driver shows it:")
            table({"predicted peak": self.peak_bytes, **self.driver_terms}, "driver-level peak")
        if job.vram_bytes is not None:
            left = job.vram_bytes - self.driver_bytes
            lines.append(f"  of {format_bytes(job.vram_bytes)}: {format_bytes(left)} left")
        lines.append("host memory:")
        table(self.host_terms, "total")
        moved = format_bytes(self.transfer_bytes_per_step)
        lines.append(f"a step copies {self.loads_per_step} blocks ({moved})")
        if self.step_seconds is None:
            unknown = "link speed" if self.transfer_seconds is None else "compute speed"
            lines.append(f"step time: unknown ({unknown} not measured)")
        else:
            assert self.compute_seconds is not None and self.transfer_seconds is not None
            lines.append(
                f"step time: at least {format_seconds(self.step_seconds)} "
                f"(compute {format_seconds(self.compute_seconds)}, "
                f"transfer {format_seconds(self.transfer_seconds)})"
            )
        return lines + [f"note: {note}" for note in self.notes]


def make_plan(shape: ModelShape, **options: Any) -> Plan:
    """Plan a run on a model; `options` are the fields of `Job`.

    Raises:
        ConfigError: `block_size` below 1, or targets that match nothing.
        PorosOOMError: it does not fit in `vram_bytes`; the advice gives changes that do.
    """
    job = Job(**options)
    plan = _plan(shape, job)
    if not plan.fits:
        raise _does_not_fit(plan)
    return plan


def phase_terms(shape: ModelShape, job: Job, num_slots: int) -> dict[str, dict[str, int]]:
    """The bytes, by name, of each moment of a step that can be its peak."""
    c, params = job.compute_bytes, lora_params(shape, job.lora_rank, job.target_modules)
    tokens, length = job.batch_size * job.seq_len, shape.num_blocks
    state = optimizer_state_bytes(job.optimizer, params, job.adapter_bytes)
    adapters = job.adapter_bytes * params
    held = {
        "slots": num_slots * slot_bytes(shape, job.quantization, c),
        "embeddings and head": resident_bytes(shape, c),
        "adapters": adapters,
        "optimizer state": 2 * adapters if state is None else state,
    }
    if job.device == "cuda":
        held["cuBLAS workspace (estimate)"] = CUBLAS_BYTES
    boundaries = boundary_bytes(shape, tokens, c)
    # Backward frees a boundary for every block whose gradients it makes, so the two are never
    # whole together, unless an earlier forward of the same step has left its gradients.
    earlier = job.gradient_accumulation_steps > 1
    first = (boundaries, adapters if earlier else adapters // length)
    last = (boundaries // length, adapters)
    saved, gradients = max(first, last, key=sum)
    visited = job.rows * job.seq_len
    visit = flight_bytes(shape, visited, c) + saved_bytes(
        shape,
        visited,
        job.target_modules,
        rank=job.lora_rank,
        seq_len=job.seq_len,
        quantization=job.quantization,
        device=job.device,
        compute_bytes=c,
        autocast=job.autocast,
        adapter_bytes=job.adapter_bytes,
    )
    return {
        "backward of a block": {
            **held,
            "gradients": gradients,
            "boundaries": saved,
            "dequantised matrix": workspace_bytes(shape, job.quantization, c),
            "block backward (estimate)": visit,
        },
        "loss": {
            **held,
            "gradients": adapters if earlier else 0,
            "boundaries": boundaries,
            **loss_bytes(shape, tokens, job.device, c),
        },
        "optimizer step": {
            **held,
            "gradients": adapters,
            "optimizer temporaries": optimizer_step_bytes(job.optimizer, params, job.adapter_bytes),
        },
    }


def _driver_terms(job: Job, peak: int) -> dict[str, int]:
    if job.device == "cpu":
        return {}
    return {
        "allocator slack (estimate)": round(ALLOCATOR_SLACK * peak),
        "CUDA context (estimate)": job.context_bytes,
    }


def _choose_slots(shape: ModelShape, job: Job, peak_without: int, slot: int) -> tuple[int, str]:
    """The number of slots and why."""
    length = shape.num_blocks
    if job.quantization == "int8":
        return length, f"int8 does not stream: all {length} blocks stay on the device"
    if job.block_size != "auto":
        if job.block_size < 1:
            raise ConfigError(f"block_size is {job.block_size}: give 1 or more, or auto")
        if job.block_size > length:
            return length, (
                f"clamped from {job.block_size} to {length}: the model has {length} blocks"
            )
        return job.block_size, f"{job.block_size} as asked"
    most = length
    if job.vram_bytes is not None:

        def fits(slots: int) -> bool:
            peak = peak_without + slots * slot
            return peak + sum(_driver_terms(job, peak).values()) <= (job.vram_bytes or 0)

        most = next((slots for slots in range(length, 0, -1) if fits(slots)), 1)
    if job.device == "cpu":
        slots = min(most, CPU_SLOTS)
        return slots, f"auto: {slots} on the CPU, where more slots save nothing"
    if job.vram_bytes is None:
        slots = min(most, UNASKED_SLOTS)
        return slots, f"auto: {slots}, the free device memory is not known"
    if most == length:
        return most, f"auto: all {length} blocks fit in {format_bytes(job.vram_bytes)}"
    plural = "slot fills" if most == 1 else "slots fill"
    return most, f"auto: {most} {plural} what is left of {format_bytes(job.vram_bytes)}"


def _plan(shape: ModelShape, job: Job) -> Plan:
    """The plan of a job, whether it fits or not."""
    slot = slot_bytes(shape, job.quantization, job.compute_bytes)
    without = max(sum(terms.values()) for terms in phase_terms(shape, job, 0).values())
    num_slots, reason = _choose_slots(shape, job, without, slot)
    phases = phase_terms(shape, job, num_slots)
    peak = max(sum(terms.values()) for terms in phases.values())

    store = store_bytes(shape, job.quantization, job.compute_bytes)
    largest = max(shape.embedding_params, shape.head_params) * job.compute_bytes
    host = {
        "packed base": store,
        "largest tensor while loading (estimate)": largest,
        "process (estimate)": PROCESS_BYTES,
    }
    if job.quantization == "int8":
        del host["packed base"]
    if job.device == "cpu":
        host["slots, adapters, activations"] = peak

    passes = job.gradient_accumulation_steps
    loads = passes * loads_per_pass(shape.num_blocks, num_slots)
    moved = loads * store // shape.num_blocks
    transfer = 0.0 if loads == 0 else None
    if loads and job.link_gb_per_s is not None:
        transfer = moved / (job.link_gb_per_s * 1e9)
    compute = None
    if job.flops is not None:
        tokens = passes * job.batch_size * job.seq_len
        work = step_flops(shape, tokens, job.seq_len, job.lora_rank, job.target_modules)
        compute = work / job.flops

    params = lora_params(shape, job.lora_rank, job.target_modules)
    notes = []
    if optimizer_state_bytes(job.optimizer, params) is None:
        notes.append(f"optimizer {job.optimizer} is not known here: counted as AdamW in float32")
    unpacked = sum(s * n for b, n in shape.kinds.items() for _, s in b.others)
    if unpacked > 0.05 * shape.num_params and job.quantization != "bf16":
        notes.append(
            f"{unpacked / 1e9:.2f}B parameters of the blocks (fused experts) are not quantised"
        )
    return Plan(
        shape=shape,
        job=job,
        trainable_params=params,
        num_slots=num_slots,
        slots_reason=reason,
        slot_bytes=slot,
        phases=phases,
        driver_terms=_driver_terms(job, peak),
        host_terms=host,
        loads_per_step=loads,
        transfer_bytes_per_step=moved,
        compute_seconds=compute,
        transfer_seconds=transfer,
        notes=tuple(notes),
    )


# --- what to change -----------------------------------------------------------------------------


def _halves(value: int, least: int) -> list[int]:
    """`value` halved again and again, down to `least`."""
    found = []
    while value > least:
        value = max(value // 2, least)
        found.append(value)
    return found


def _stages(job: Job, num_blocks: int) -> Iterator[list[dict[str, Any]]]:
    """The playbook: groups of changes in the order of what they cost, mildest first in each.

    Fewer slots and smaller micro-rows change no result; smaller batches, accumulated, keep the
    step's meaning; a shorter sequence and a lower rank train something else.
    """
    if job.quantization == "int8":
        yield [{"quantization": "nf4"}]
    if job.block_size != "auto":
        yield [{"block_size": slots} for slots in _halves(min(job.block_size, num_blocks), 1)]
    yield [{"micro_rows": rows} for rows in _halves(job.rows, 1)]
    total = job.batch_size * job.gradient_accumulation_steps
    yield [
        {"batch_size": rows, "gradient_accumulation_steps": total // rows}
        for rows in _halves(job.batch_size, 1)
        if total % rows == 0
    ]
    yield [{"seq_len": length} for length in _halves(job.seq_len, 64)]
    yield [{"lora_rank": rank} for rank in _halves(job.lora_rank, 4)]
    if job.quantization == "bf16":
        yield [{"quantization": "nf4"}]


def changes_that_fit(plan: Plan) -> tuple[dict[str, Any], Plan]:
    """The changes to a plan's job that make it fit, and the plan with them.

    When nothing does, the changes are the whole playbook and that plan does not fit either.
    """
    shape, job = plan.shape, plan.job
    stages = [changes for stage in _stages(job, shape.num_blocks) for changes in stage]
    changes: dict[str, Any] = {}
    for step in stages:
        if plan.fits:
            break
        changes |= step
        plan = _plan(shape, replace(job, **changes))
    if plan.fits:
        # An early change may have bought nothing, where another moment of the step is the peak.
        for name in [name for name in changes if name != "gradient_accumulation_steps"]:
            dropped = {name, "gradient_accumulation_steps"} if name == "batch_size" else {name}
            fewer = {key: value for key, value in changes.items() if key not in dropped}
            smaller = _plan(shape, replace(job, **fewer))
            if smaller.fits:
                changes, plan = fewer, smaller
    return changes, plan


def _does_not_fit(plan: Plan) -> PorosOOMError:
    shape, job = plan.shape, plan.job
    assert job.vram_bytes is not None
    changes, changed = changes_that_fit(plan)
    yaml_names = {"seq_len": "max_seq_length"}
    listed = ", ".join(f"{yaml_names.get(k, k)}: {v}" for k, v in changes.items())
    device = "device memory" if job.device == "cuda" else "memory"
    needs, short = changed.driver_bytes, (changed if not changed.fits else plan).driver_bytes
    free = (
        f"close other programs that hold {device}, to free {format_bytes(short - job.vram_bytes)}"
    )
    if changed.fits:
        advice = f"set {listed} (needs {format_bytes(needs)}), or {free}"
    else:
        tried = f"even with {listed} it" if listed else "it"
        advice = f"{tried} needs {format_bytes(needs)}: {free}"
    return PorosOOMError(
        f"{shape.name} does not fit: {plan.num_slots} of {shape.num_blocks} blocks on the device, "
        f"{job.batch_size} x {job.seq_len} tokens, rank {job.lora_rank}, peak in the {plan.phase}",
        needed=plan.driver_bytes,
        free=job.vram_bytes,
        terms={**plan.terms, **plan.driver_terms},
        advice=f"{advice}, or choose a smaller model",
    )


@dataclass(frozen=True)
class FitRow:
    """A card of `vram_gb` * 10**9 bytes, and its plan; None when nothing fits."""

    vram_gb: int
    plan: Plan | None


def fit_table(
    shape: ModelShape, vram_gb: Sequence[int] = (4, 6, 8, 12, 16, 24, 32), **options: Any
) -> list[FitRow]:
    """The plan for each size of card, with as many slots as fit.

    `options` are the other fields of `Job`; `block_size` is `auto`, `vram_bytes` the card's.

    Raises:
        ConfigError: as `make_plan`.
    """
    rows = []
    for size in vram_gb:
        job = Job(**{**options, "block_size": "auto", "vram_bytes": size * 10**9})
        plan = _plan(shape, job)
        rows.append(FitRow(size, plan if plan.fits else None))
    return rows
