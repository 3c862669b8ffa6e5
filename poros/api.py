"""The one place where everything meets: `load`, `stream`, `unstream`, `PorosTrainer`, `train`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poros.checkpoint import RunFolder
from poros.config import RunConfig, make_config
from poros.core.attach import Streamed, attach, detach, find_blocks, streamed
from poros.data import check_trainable, ensure_chat_template, load_rows, split_eval
from poros.errors import ModelError, PorosError, PorosOOMError
from poros.loader import load, pick_device
from poros.plan import CPU_SLOTS, Plan, make_plan
from poros.report import Progress, peak_memory
from poros.shapes import read_model_shape
from poros.trainer import StopOnSignal, add_adapter, answer, build_trainer, compute_dtype
from poros.units import format_bytes, parse_size

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from trl import SFTTrainer

__all__ = ["PorosTrainer", "load", "stream", "train", "unstream"]

Model = TypeVar("Model", bound=nn.Module)


def stream(
    model: Model,
    block_size: int | Literal["auto"] = "auto",
    *,
    micro_rows: int | None = None,
    device: str | torch.device = "auto",
    poison: bool = False,
) -> Model:
    """Stream the frozen base of `model` (a PEFT model, on any device) and return the same model.

    From here on the blocks' frozen tensors lie in host memory and visit `device` through
    `block_size` slots; everything else is on `device`. Losses, gradients and adapters are bit for
    bit those of the resident model.

    Args:
        model: what `get_peft_model` returned; it keeps its classes, names and keys.
        block_size: blocks on the device at once, 1 or more; more than the model has means all.
            `auto`: what half of the free VRAM holds, two at least (on the CPU: two).
        micro_rows: rows of the batch that pass through a block at a time in training.
        device: `auto`, or a torch device.
        poison: debugging: overwrite each slot behind its visit, so that a read outside it shows.

    Raises:
        ModelError: no block list that Poros knows, an int8 base, or a model streamed already.
        PorosError: `block_size` or `micro_rows` below 1.
        PorosOOMError: the slots or what stays resident do not fit.
    """
    target = pick_device(device)
    _, layers = find_blocks(model)
    if block_size != "auto" and (not isinstance(block_size, int) or block_size < 1):
        raise PorosError(f"block_size must be 1 or more, or 'auto', but is {block_size!r}")
    if micro_rows is not None and micro_rows < 1:
        raise PorosError(f"micro_rows must be 1 or more, but is {micro_rows!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        model.requires_grad_(False)
    with _memory_errors(target):
        state = attach(
            model,
            _slots if block_size == "auto" else min(block_size, len(layers)),
            device=target,
            micro_rows=micro_rows,
            poison=poison,
        )
    if block_size != "auto" and block_size > len(layers):
        state.notes.append(
            f"block_size {block_size} is more than the model has: all {len(layers)} blocks stay"
        )
    if "page-locked" not in state.store.reason[:12] and target.type == "cuda":
        state.notes.append(f"host memory is {state.store.reason}")
    return model


def _slots(block_bytes: int, num_blocks: int, device: torch.device) -> int:
    """Slots for `block_size='auto'` without a plan: half of the free VRAM, the rest to compute."""
    if device.type != "cuda":
        return min(CPU_SLOTS, num_blocks)
    free, _ = torch.cuda.mem_get_info(device)
    return max(min(2, num_blocks), min(num_blocks, free // 2 // max(block_bytes, 1)))


def unstream(model: Model) -> Model:
    """Undo `stream`: an ordinary model with its base on the device; returns the same model.

    Raises:
        ModelError: the model is not streamed.
        PorosOOMError: the base does not fit on the device.
    """
    state = streamed(model)
    if state is None:
        raise ModelError("the model is not streamed: there is nothing to undo")
    with _memory_errors(state.stream.device):
        detach(model)
    return model


class PorosTrainer:
    """LoRA fine-tuning of a streamed base: `from_pretrained`, `train`, `save`.

    Settings are those of the run file (`RunConfig`), with `seq_len` for `max_seq_length`.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: dict[str, Any],
        *,
        console: Console | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.plan: Plan | None = None
        self._settings = settings
        self._console = console or Console()

    @classmethod
    def from_pretrained(
        cls, model: str, *, console: Console | None = None, **settings: Any
    ) -> PorosTrainer:
        """Load `model` (hub id or folder) into host memory and add a fresh adapter to it.

        Raises:
            ConfigError: an unknown setting or a wrong value; all of them at once.
            ModelError: the model cannot be loaded, or the adapter cannot be put on it.
            HardwareError: CUDA was asked for and is not there.
        """
        settings = {"model": model, **settings}
        config = make_config({"data": "given to train()", **settings})
        device = pick_device(config.device)
        tokenizer = _load_tokenizer(config)
        base = load(
            config.model,
            quantization=config.quantization,
            nf4_load_strategy=config.nf4_load_strategy,
            device=device,
            dtype=compute_dtype(device)[0],
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        return cls(add_adapter(base, config), tokenizer, settings, console=console)

    def train(
        self,
        data: str | Dataset,
        *,
        steps: int | None = None,
        seq_len: int | None = None,
        **settings: Any,
    ) -> dict[str, float]:
        """Fine-tune on `data` (as `RunConfig.data`, or a `datasets.Dataset` of the same columns).

        Checkpoints and logs go to `output` if it is given. Returns the trainer's metrics and,
        where rows are held out, `eval_loss_before` and `eval_loss`.

        Raises:
            ConfigError, DataError, OutputError, PorosOOMError: before the first step.
        """
        given = {"steps": steps, "seq_len": seq_len, **settings}
        given = {key: value for key, value in given.items() if value is not None}
        name = data if isinstance(data, str) else "a datasets.Dataset"
        config = make_config({**self._settings, **given, "data": name})
        folder = RunFolder(config) if "output" in {**self._settings, **given} else None
        resume = folder.open() if folder is not None else None
        rows = _Rows.of(config, self.tokenizer, data)
        return self._run(config, rows, folder, resume)

    def save(self, path: str | Path) -> None:
        """Write the adapter and the tokenizer as PEFT and transformers do."""
        self.model.save_pretrained(str(path))
        self.tokenizer.save_pretrained(str(path))

    def _run(
        self, config: RunConfig, rows: _Rows, folder: RunFolder | None, resume: Path | None
    ) -> dict[str, float]:
        device = pick_device(config.device)
        if streamed(self.model) is None and config.quantization != "int8":
            self.plan = plan_run(config, device)
            self._say("\n".join(self.plan.lines()))
            stream(
                self.model,
                self.plan.num_slots,
                micro_rows=config.micro_rows,
                device=device,
            )
        elif config.quantization == "int8":
            self._say("int8 does not stream: the whole base is on the device")
        state = streamed(self.model)
        adapter_bytes = sum(
            p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad
        )
        stop = StopOnSignal()
        with tempfile.TemporaryDirectory() as temporary:
            output = str(folder.path) if folder is not None else temporary
            progress = Progress(
                self._console, device, state, folder.path if folder is not None else None
            )
            trainer = build_trainer(
                self.model,
                self.tokenizer,
                config,
                output=temporary,
                train_data=rows.train,
                eval_data=rows.held_out,
                device=device,
                callbacks=[progress, stop],
            )
            self._say(str(rows.check(trainer, self.tokenizer, config)))
            if folder is not None:
                folder.check_space(adapter_bytes)
                folder.start(self._choices(config, device, state))
            trainer.args.output_dir = output
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                with _memory_errors(device, self.plan), stop.listening():
                    return self._fit(trainer, config, folder, resume, stop)
            finally:
                progress.close()

    def _fit(
        self,
        trainer: SFTTrainer,
        config: RunConfig,
        folder: RunFolder | None,
        resume: Path | None,
        stop: StopOnSignal,
    ) -> dict[str, float]:
        results: dict[str, float] = {}
        evaluates = trainer.eval_dataset is not None
        if resume is not None:
            self._say(f"resuming from {resume}")
        elif evaluates:
            results["eval_loss_before"] = float(trainer.evaluate()["eval_loss"])
            self._say(f"held-out loss before: {results['eval_loss_before']:.4f}")
        if config.prompt is not None and resume is None:
            self._answer("before", config.prompt)
        if stop.stopped:
            raise KeyboardInterrupt
        result = trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
        results |= {key: float(value) for key, value in result.metrics.items()}
        if stop.stopped and trainer.state.global_step < trainer.state.max_steps:
            where = f"checkpoint in {folder.path}" if folder is not None else "nothing was kept"
            self._say(
                f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; {where}"
                + ("\nresume: run the same command again" if folder is not None else "")
            )
            raise KeyboardInterrupt
        if evaluates:
            results["eval_loss"] = float(trainer.evaluate()["eval_loss"])
            self._say(f"held-out loss after: {results['eval_loss']:.4f}")
        if config.prompt is not None:
            self._answer("after", config.prompt)
        what, peak = peak_memory(trainer.args.device)
        results["peak_gib"] = peak
        planned = (
            f" (planned {format_bytes(self.plan.peak_bytes)})"
            if self.plan and what == "VRAM"
            else ""
        )
        self._say(f"peak {what} {peak:.2f} GiB{planned}")
        if folder is not None:
            self.save(folder.path)
            folder.finish(results)
            self._say(f"adapter: {folder.path}")
        return results

    def _answer(self, when: str, prompt: str) -> None:
        self._say(f"{when}: {prompt}\n  {answer(self.model, self.tokenizer, prompt)}")

    def _choices(
        self, config: RunConfig, device: torch.device, state: Streamed | None
    ) -> dict[str, Any]:
        return {
            "device": str(device),
            "compute_dtype": compute_dtype(device)[1],
            "slots": self.plan.slots_reason if self.plan is not None else None,
            "host_memory": state.store.reason if state is not None else None,
            "notes": state.notes if state is not None else [],
            "plan": self.plan.to_dict() if self.plan is not None else None,
        }

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def plan_run(config: RunConfig, device: torch.device) -> Plan:
    """The plan of a run on this machine.

    Raises:
        PorosOOMError: it does not fit; says what would.
    """
    limit = parse_size(config.vram) if config.vram is not None else None
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        limit = min(limit, free) if limit is not None else free
    return make_plan(
        read_model_shape(config.model, config.revision),
        vram_bytes=limit,
        device="cuda" if device.type == "cuda" else "cpu",
        context_bytes=0,
        **config.plan_options(),
    )


def train(config: RunConfig, console: Console | None = None) -> dict[str, float]:
    """Do what a run file says: check, load, plan, stream, train, save; resumes a stopped run.

    Nothing is written before every check has passed and the model is loaded.

    Raises:
        PorosError: any mistake of the run file, the data, the model or the machine.
        KeyboardInterrupt: stopped by the user; a checkpoint was kept if a step had been made.
    """
    folder = RunFolder(config)
    resume = folder.open()
    pick_device(config.device)
    tokenizer = _load_tokenizer(config)
    rows = _Rows.of(config, tokenizer, config.data)
    settings = config.model_dump(exclude={"data"})
    trainer = PorosTrainer.from_pretrained(console=console, **settings)
    return trainer._run(config, rows, folder, resume)


class _Rows:
    """The data of a run and what was found about it."""

    def __init__(self, train: Dataset, held_out: Dataset | None, summary: Any) -> None:
        self.train, self.held_out, self.summary = train, held_out, summary

    @classmethod
    def of(
        cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase, data: str | Dataset
    ) -> _Rows:
        if isinstance(data, str):
            rows, summary = load_rows(data, split=config.data_split, data_format=config.data_format)
        else:
            rows, summary = data, None
        held_out = None
        if config.eval_data is not None:
            held_out, _ = load_rows(config.eval_data, data_format=config.data_format)
        elif config.eval_rows:
            rows, held_out = split_eval(rows, config.eval_rows, config.seed)
        for part in (rows, held_out):
            if part is not None:
                ensure_chat_template(tokenizer, part)
        return cls(rows, held_out, summary)

    def check(
        self, trainer: SFTTrainer, tokenizer: PreTrainedTokenizerBase, config: RunConfig
    ) -> Any:
        if self.summary is None:
            return f"{len(self.train)} rows"
        return check_trainable(
            trainer.train_dataset, self.train, self.summary, tokenizer, config.max_seq_length
        )


def _load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {config.model}: its tokenizer cannot be loaded: {first} (wanted: a hub id or a"
            " folder with tokenizer files; offline, only what is in the cache or in a folder)"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _memory_errors(device: torch.device, plan: Plan | None = None) -> Iterator[None]:
    """Turn CUDA's out-of-memory into `PorosOOMError` with the sizes that are known."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise PorosOOMError(
            f"CUDA ran out of memory: {str(error).splitlines()[0]}",
            needed=plan.peak_bytes if plan is not None else None,
            free=free + torch.cuda.memory_allocated(device) if plan is not None else None,
            terms={
                **(plan.terms if plan is not None else {}),
                "in use by this process": torch.cuda.memory_allocated(device),
                "free on the card": free,
                "size of the card": total,
            },
            advice="halve block_size (4 -> 2 -> 1), then shorten max_seq_length, then lower"
            " lora_rank; close other programs that use the GPU",
        ) from error
