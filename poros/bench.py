"""Step time, peak memory and link use of a streamed run beside two resident ones.

The models have real shapes and random weights, so nothing has to be downloaded: neither time nor
memory depends on the values. The programs are timed in alternation within one process, so that a
clock that changes meets all of them; peaks are measured afterwards with each program alone, because
what the driver holds cannot be told apart between several.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import bnb as lora_bnb
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros import validation
from poros.core.attach import Streamed, attach
from poros.errors import ConfigError, PorosOOMError
from poros.loader import nf4_config, pick_device
from poros.shapes import KNOWN_MODELS
from poros.units import GIB

STD = 0.02  # of every random weight: activations stay finite at any depth
LORA_RANK = 16
PROGRAMS = ("streamed", "resident", "peft")


# -- models ----------------------------------------------------------------------------------------


def model_config(shape: str | Mapping[str, Any], num_blocks: int | None = None) -> dict[str, Any]:
    """The config of a `KNOWN_MODELS` name, or `shape` itself, with `num_blocks` layers if given.

    Raises:
        ConfigError: an unknown name, or a config without what every shape has.
    """
    if isinstance(shape, str):
        if shape not in KNOWN_MODELS:
            raise ConfigError(f"shape {shape!r} is unknown; known: {', '.join(KNOWN_MODELS)}")
        shape = KNOWN_MODELS[shape]
    needed = {"model_type", "num_hidden_layers", "vocab_size"}
    if missing := needed - shape.keys():
        raise ConfigError(f"the shape has no {', '.join(sorted(missing))}")
    return {**shape, **({} if num_blocks is None else {"num_hidden_layers": num_blocks})}


def random_model(
    shape: str | Mapping[str, Any],
    *,
    num_blocks: int | None = None,
    quantization: str = "nf4",
    device: torch.device,
    host: bool,
    seed: int = 0,
) -> PreTrainedModel:
    """A causal LM of this shape with random bf16 weights, quantised as `from_pretrained` does it.

    `shape` is a name of `KNOWN_MODELS` or a config as a dict with its `model_type`. Every weight is
    drawn and quantised on `device` from a seed of its own, and taken to host memory if `host`: the
    bytes are the same either way. The device holds one full-precision tensor at a time.

    Raises:
        ConfigError: an unknown shape or a quantization other than nf4 and bf16.
    """
    if quantization not in ("nf4", "bf16"):
        raise ConfigError(f"quantization {quantization!r} is unknown here: use nf4 or bf16")
    place = torch.device("cpu") if host else device
    settings = model_config(shape, num_blocks)
    family = settings.pop("model_type")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"model_type {family!r} is no causal LM that transformers knows")
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantizer = None
    if quantization == "nf4":
        quantizer = Bnb4BitHfQuantizer(nf4_config(), pre_quantized=False)
        quantizer.preprocess_model(model=model, device_map={"": place})
        quantise = quantizer.get_quantize_ops()
    for name, parameter in list(model.named_parameters()):
        value = _random_tensor(name, parameter.shape, device, seed)
        if quantizer is not None and quantizer.param_needs_quantization(model, name):
            made = quantise.convert({name: value}, model=model, full_layer_name=name)[name]
            made = made.to(place) if host else made
        else:
            made = nn.Parameter(value.to(place), requires_grad=False)
        del value
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, made)
    model.tie_weights()
    for name, module in list(model.named_modules()):
        # Buffers that no checkpoint holds, rotary frequencies above all, come from the constructor.
        if any(buffer.is_meta for buffer in module._buffers.values() if buffer is not None):
            model.set_submodule(name, type(module)(config).to(place))
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, f"never given a value: {left}"
    return model.eval()  # type: ignore[no-any-return]


def _random_tensor(name: str, shape: torch.Size, device: torch.device, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
    value = torch.empty(shape, dtype=torch.bfloat16, device=device)
    value.normal_(0.0, STD, generator=generator)
    return (
        value.add_(1.0) if len(shape) == 1 and name.endswith("weight") else value
    )  # norms: near 1


def add_lora(base: PreTrainedModel, *, dropout: float = 0.0, seed: int = 0) -> PeftModel:
    """LoRA of rank 16 in fp32 on every linear layer of the blocks, in training mode.

    Both factors are random, the same on every device: with `lora_B` at zero, as PEFT starts it, no
    gradient reaches `lora_A`.
    """
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lora_dropout=dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    quantised = any(isinstance(module, Linear4bit) for module in base.modules())
    model = get_peft_model(base, config)
    assert isinstance(model, PeftModel)
    wanted: type = lora_bnb.Linear4bit if quantised else LoraLinear
    kinds: set[type] = {type(module) for module in model.modules() if isinstance(module, LoraLayer)}
    # Without the marks of a 4-bit model PEFT takes its generic layer, which computes other numbers.
    assert kinds == {wanted}, f"LoRA layers are {kinds}, wanted {wanted} alone"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.dtype is torch.float32
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * STD)
    return model.train()


# -- programs --------------------------------------------------------------------------------------


@dataclass
class Program:
    """A model that trains, one of `PROGRAMS`; `streaming` is None for `peft`."""

    name: str
    model: PeftModel
    optimizer: torch.optim.AdamW
    streaming: Streamed | None
    device: torch.device

    def backward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of `ids` (batch, sequence) int64 under bf16 autocast, differentiated."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            output = self.model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.loss.detach(), output.logits.detach()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """One optimizer step; returns the loss, which may still be on its way."""
        loss, _ = self.backward(ids)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def build(
    name: str,
    shape: str | Mapping[str, Any],
    *,
    num_slots: int | None = None,
    num_blocks: int | None = None,
    quantization: str = "nf4",
    device: torch.device,
    dropout: float = 0.0,
    poison: bool = False,
    seed: int = 0,
) -> Program:
    """One of `PROGRAMS` on a random model: the same weights and adapters for the same `seed`.

    `streamed` runs with `num_slots` slots, `resident` is the same with a slot for every block, and
    `peft` the untouched model on the device with ordinary gradient checkpointing.
    """
    base = random_model(
        shape,
        num_blocks=num_blocks,
        quantization=quantization,
        device=device,
        host=name != "peft",
        seed=seed,
    )
    model = add_lora(base, dropout=dropout, seed=seed)
    streaming = None
    if name == "peft":
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        slots = base.config.num_hidden_layers if name == "resident" else num_slots
        assert slots is not None
        streaming = attach(model, slots, device=device, poison=poison)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Program(name, model, torch.optim.AdamW(trained, lr=1e-4, fused=True), streaming, device)


def random_ids(
    tokens: str, shape: str | Mapping[str, Any], device: torch.device, seed: int = 0
) -> torch.Tensor:
    """Token ids for `tokens`, written `<batch>x<sequence>`: (batch, sequence) int64 on `device`.

    Raises:
        ConfigError: `tokens` is not written so.
    """
    batch, _, length = tokens.partition("x")
    if not (batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ConfigError(f"tokens {tokens!r}: wanted <batch>x<sequence>, such as 8x512")
    generator = torch.Generator().manual_seed(seed)
    size = (int(batch), int(length))
    vocabulary = model_config(shape)["vocab_size"]
    return torch.randint(vocabulary, size, generator=generator).to(device)


# -- measuring -------------------------------------------------------------------------------------


def bench(
    shape: str | Mapping[str, Any] = "qwen2.5-7b",
    *,
    tokens: Sequence[str] = ("1x512", "8x512"),
    slots: Sequence[int] = (2,),
    programs: Sequence[str] = PROGRAMS,
    num_blocks: int | None = None,
    quantization: str = "nf4",
    num_steps: int = 10,
    num_warmup: int = 3,
    device: str | torch.device = "auto",
    limit_s: float | None = None,
    out: Path | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure `programs` at every one of `tokens`; `streamed` once for each of `slots`.

    All programs are built at once, so the device must hold the resident ones together. Peaks, the
    link and its use are measured on CUDA only. `limit_s` ends the measuring early, with what there
    is by then. Returns the validation artifact, written to `out` after every result.

    Raises:
        ConfigError: an unknown shape, program or quantization, tokens that are not
            `<batch>x<sequence>`, slots outside 1 to the number of blocks, or no steps.
        PorosOOMError: the device ran out of memory; the results before that are in `out`.
    """
    where = pick_device(device)
    blocks = int(model_config(shape, num_blocks)["num_hidden_layers"])
    if unknown := set(programs) - set(PROGRAMS):
        raise ConfigError(f"program {', '.join(sorted(unknown))} is unknown: {', '.join(PROGRAMS)}")
    if wrong := [s for s in slots if not 1 <= s <= blocks]:
        raise ConfigError(f"slots {wrong}: wanted 1 to {blocks}, the number of blocks")
    if num_steps < 1:
        raise ConfigError(f"num_steps: found {num_steps}, wanted at least 1")
    wanted = dict.fromkeys(  # once, however often it was asked for
        (name, count)
        for name in programs
        for count in {"streamed": tuple(slots), "resident": (blocks,), "peft": (None,)}[name]
    )
    batches = {text: random_ids(text, shape, where) for text in tokens}
    common = {
        "model": shape if isinstance(shape, str) else "custom",
        "quantization": quantization,
        "lora": "all-linear",
        "lora_rank": LORA_RANK,
        "compute": "exact",
    }
    if num_blocks is not None or not isinstance(shape, str):
        common["num_blocks"] = blocks
    run = _Run(common, where, out, log, time.monotonic() + limit_s if limit_s else None)

    def make(name: str, count: int | None) -> Program:
        start = time.monotonic()
        made = build(
            name,
            shape,
            num_slots=count,
            num_blocks=num_blocks,
            quantization=quantization,
            device=where,
        )
        note = f"; store: {made.streaming.store.reason}" if made.streaming else ""
        log(f"built {_label(name, count)} in {time.monotonic() - start:.1f} s{note}")
        return made

    try:
        built = {key: make(*key) for key in wanted}
        run.measure_link(built.values())
        for text, ids in batches.items():
            run.time(text, ids, built, num_warmup, num_steps)
        built.clear()
        if where.type == "cuda":
            for key in wanted:
                _free(where)
                if run.over():
                    break
                run.peaks(key, make(*key), batches)
    except torch.OutOfMemoryError as error:
        raise PorosOOMError(
            f"bench: the device ran out of memory: {error}",
            advice="fewer programs, slots or tokens (resident and peft each hold the whole base)",
        ) from error
    return run.artifact()


class _Run:
    """The rows so far, and how each kind of them is measured."""

    def __init__(
        self,
        common: dict[str, Any],
        device: torch.device,
        out: Path | None,
        log: Callable[[str], None],
        deadline: float | None,
    ) -> None:
        self.common, self.device, self.out, self.log = common, device, out, log
        self.deadline = deadline
        self.rows: list[dict[str, Any]] = []
        self.machine = validation.machine(None)

    def over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def artifact(self) -> dict[str, Any]:
        return validation.artifact("bench", self.machine, self.rows)

    def add(self, key: tuple[str, int | None], more: Mapping[str, Any], **metrics: float) -> None:
        """Rows of one program for one case; written at once."""
        name, count = key
        case = {**self.common, "program": name, **more}
        if count is not None:
            case |= {"block_size": count, "store": "ram"}
        self.rows += [validation.row(case, metric, value) for metric, value in metrics.items()]
        if self.out is not None:
            validation.write(self.out, self.artifact())
        shown = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
        self.log(f"{more['tokens']} {_label(name, count)}: {shown}")

    def measure_link(self, programs: Iterable[Program]) -> None:
        """GB/s of copies from the store into a slot, with nothing else under way; CUDA only."""
        found = next((p.streaming for p in programs if p.streaming is not None), None)
        if found is None or self.device.type != "cuda":
            return
        target = torch.empty_like(found.stream.slots[0].buffer)
        sources = [b for b in found.store.buffers if len(b) == len(target)][:8]
        torch.cuda.synchronize()
        for _ in range(2):  # the first round warms up
            start = time.perf_counter()
            for source in sources:
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        rate = len(sources) * len(target) / seconds / 1e9
        self.machine["link_gb_per_s"] = round(rate, 2)
        self.log(f"link: {rate:.1f} GB/s in copies of {len(target) / 1e6:.1f} MB")

    def time(
        self,
        tokens: str,
        ids: torch.Tensor,
        built: Mapping[tuple[str, int | None], Program],
        num_warmup: int,
        num_steps: int,
    ) -> None:
        """Medians over `num_steps` rounds in which every program takes one step."""
        spent: dict[tuple[str, int | None], list[float]] = {key: [] for key in built}
        before: dict[tuple[str, int | None], tuple[int, int]] = {}
        for number in range(-num_warmup, num_steps):
            if self.over():
                break
            for key, program in built.items():
                if number == 0:
                    before[key] = _loads(program)
                seconds = self._seconds(program, ids)
                if number >= 0:
                    spent[key].append(seconds)
        done = min(len(times) for times in spent.values())
        if done < num_steps:
            self.log(f"{tokens}: the time is up after {done} of {num_steps} steps")
        if not done:
            return
        medians = {key: statistics.median(times) for key, times in spent.items()}
        for key, program in built.items():
            times, median = spent[key], medians[key]
            metrics = {
                "step_ms": median * 1e3,
                "step_ms_min": min(times) * 1e3,
                "step_ms_max": max(times) * 1e3,
            }
            if program.streaming is not None:
                loads, size = (a - b for a, b in zip(_loads(program), before[key], strict=True))
                metrics["loads_per_step"] = loads / done
                if self.device.type == "cuda":
                    metrics["link_used_gb_per_s"] = size / done / median / 1e9
            for other, seconds in medians.items():
                if other[0] != "streamed" and other != key:
                    metrics[f"ratio_to_{other[0]}"] = median / seconds
            self.add(key, {"tokens": tokens, "num_steps": done}, **metrics)

    def _seconds(self, program: Program, ids: torch.Tensor) -> float:
        """Time of one step from an idle device to an idle device."""
        _wait(self.device)
        start = time.perf_counter()
        loss = program.step(ids)
        _wait(self.device)
        seconds = time.perf_counter() - start
        if not torch.isfinite(loss):
            raise RuntimeError(f"{program.name}: the loss is {float(loss)}")
        return seconds

    def peaks(
        self, key: tuple[str, int | None], program: Program, batches: Mapping[str, torch.Tensor]
    ) -> None:
        """Peaks of steady steps, with `program` alone on the device; CUDA only."""
        for tokens, ids in batches.items():
            program.step(ids)  # makes the optimizer's state
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                self._seconds(program, ids)
            # The allocator gives nothing back by itself, so what is in use now is the peak.
            free, total = torch.cuda.mem_get_info()
            self.add(
                key,
                {"tokens": tokens},
                peak_allocated_gib=torch.cuda.max_memory_allocated() / GIB,
                peak_driver_gib=(total - free) / GIB,
            )


def _label(name: str, count: int | None) -> str:
    return name if count is None else f"{name} ({count} slots)"


def _loads(program: Program) -> tuple[int, int]:
    """Blocks and bytes copied so far."""
    stats = program.streaming.stream.stats if program.streaming is not None else None
    return (stats.loads, stats.loaded_bytes) if stats is not None else (0, 0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    """Give back what deleted programs held: modules and hooks form cycles."""
    _wait(device)
    gc.collect()
    torch.cuda.empty_cache()
