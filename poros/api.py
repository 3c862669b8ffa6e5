"""The one place where everything meets: `load`, `stream`, `unstream`, `PorosTrainer`, `train`."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import nn

from poros.checkpoint import RECORD, RunFolder
from poros.config import RunConfig, make_config
from poros.core.attach import Streamed, attach, detach, find_blocks, streamed
from poros.data import DataSummary, check_trainable, ensure_chat_template, load_rows, split_eval
from poros.errors import ConfigError, ModelError, OutputError, PorosError
from poros.loader import load, load_tokenizer, memory_errors, pick_device
from poros.plan import CPU_SLOTS, Plan, make_plan
from poros.report import Progress, peak_memory
from poros.shapes import read_model_shape
from poros.trainer import (
    StopOnSignal,
    add_adapter,
    answer,
    build_trainer,
    check_names,
    compute_dtype,
    own_forward,
)
from poros.units import format_bytes, parse_size

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase
    from trl import SFTTrainer

__all__ = ["PorosTrainer", "load", "stream", "train", "unstream"]

Model = TypeVar("Model", bound=nn.Module)

# What the model in a PorosTrainer was made with: `train` cannot change it.
_OF_THE_MODEL = (
    *("model", "revision", "trust_remote_code", "quantization", "nf4_load_strategy", "device"),
    *("lora_rank", "lora_alpha", "lora_dropout", "target_modules"),
)
# What `train` decides when it streams the model, so the first time only.
_OF_THE_STREAM = ("block_size", "vram")


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
    bit those of the resident model. What was not done as asked is a warning.

    Args:
        model: what `get_peft_model` returned; it keeps its classes, names and keys.
        block_size: blocks on the device at once, 1 or more; more than the model has means all.
            `auto`: what half of the free VRAM holds, two at least (on the CPU: two).
        micro_rows: rows of the batch that pass through a block at a time in training.
        device: `auto`, or a torch device.
        poison: debugging: overwrite each slot behind its visit, so that a read outside it shows.

    Raises:
        ModelError: no block list that Poros knows, an int8 base, nothing frozen in the blocks, or
            a model streamed already.
        HardwareError: CUDA was asked for and is not there.
        PorosError: `block_size` or `micro_rows` below 1.
        PorosOOMError: the slots or what stays resident do not fit.
    """
    state = _stream(model, block_size, micro_rows, pick_device(device), poison)
    for note in state.notes:
        warnings.warn(note, stacklevel=2)
    return model


def _stream(
    model: nn.Module,
    block_size: int | Literal["auto"],
    micro_rows: int | None,
    device: torch.device,
    poison: bool = False,
) -> Streamed:
    if block_size != "auto" and (not isinstance(block_size, int) or block_size < 1):
        raise PorosError(f"block_size must be 1 or more, or 'auto', but is {block_size!r}")
    if micro_rows is not None and (not isinstance(micro_rows, int) or micro_rows < 1):
        raise PorosError(f"micro_rows must be 1 or more, but is {micro_rows!r}")
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"poros.stream takes a model, such as get_peft_model returns, not a"
            f" {type(model).__name__}: load a hub id or folder with poros.load first"
        )
    name, layers = find_blocks(model)
    if all(parameter.requires_grad for parameter in layers.parameters()):
        raise ModelError(
            f"nothing would stream: every parameter of {name} is trainable; wanted a frozen base:"
            " add an adapter with get_peft_model, or call model.requires_grad_(False)"
        )
    num_slots = _slots if block_size == "auto" else min(block_size, len(layers))
    with memory_errors(device, "streaming the model"):
        state = attach(model, num_slots, device=device, micro_rows=micro_rows, poison=poison)
    if block_size != "auto" and block_size > len(layers):
        state.notes.append(
            f"block_size {block_size} is more than the {len(layers)} blocks of the model: all stay"
        )
    if device.type == "cuda" and state.store.pinned_bytes < state.store.nbytes:
        state.notes.append(f"the base is in {state.store.reason}")
    return state


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
    with memory_errors(state.stream.device, "putting the base on the device"):
        detach(model)
    return model


class PorosTrainer:
    """LoRA fine-tuning of a streamed base: `from_pretrained`, `train`, `save`.

    Settings are those of the run file (`RunConfig`), with `seq_len` for `max_seq_length`. `model`
    is the PEFT model; it streams from the first `train` on.
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
        self._folder: Path | None = None  # of the present run

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
        source = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        tokenizer = load_tokenizer(config.model, **source)
        base = load(
            config.model,
            quantization=config.quantization,
            nf4_load_strategy=config.nf4_load_strategy,
            device=device,
            dtype=compute_dtype(device)[0],
            **source,
        )
        return cls(add_adapter(base, config), tokenizer, settings, console=console)

    def train(
        self,
        data: str | Path | Dataset,
        *,
        steps: int | None = None,
        seq_len: int | None = None,
        **settings: Any,
    ) -> dict[str, float]:
        """Fine-tune on `data` (as `RunConfig.data`, or a `datasets.Dataset` of the same columns).

        Checkpoints and logs go to `output` if it is given. Called again, it goes on with the
        adapter as it is, under a new optimizer. Returns the trainer's metrics and, where rows are
        held out, `eval_loss_before` and `eval_loss`.

        Raises:
            ConfigError, DataError, OutputError, PorosOOMError: before the first step.
        """
        given = {"steps": steps, "seq_len": seq_len, **settings}
        given = {key: value for key, value in given.items() if value is not None}
        fixed = [*_OF_THE_MODEL, *(_OF_THE_STREAM if streamed(self.model) is not None else ())]
        late = [key for key in given if key in fixed]
        if late:
            raise ConfigError(
                f"{', '.join(late)}: decided already for this model; give it to from_pretrained"
            )
        name = str(data) if isinstance(data, str | Path) else "a datasets.Dataset"
        config = make_config({**self._settings, **given, "data": name})
        check_names(config)
        folder = RunFolder(config) if "output" in {**self._settings, **given} else None
        resume = folder.open() if folder is not None else None
        rows = _Rows(config, self.tokenizer, data)
        return self._run(config, rows, folder, resume)

    def save(self, path: str | Path) -> None:
        """Write the adapter and the tokenizer as PEFT and transformers do.

        The loaded model gives the same bits as this one under bf16 autocast, as in training.
        Without autocast, the adapter of an nf4 base, which is trained in bf16, needs
        `PeftModel.from_pretrained(..., autocast_adapter_dtype=False)`: PEFT makes it float32.

        Raises:
            OutputError: the folder holds another run.
        """
        if (Path(path) / RECORD).exists() and Path(path) != self._folder:
            raise OutputError(f"{path} holds another run of Poros: save to a folder of its own")
        self.model.save_pretrained(str(path))
        self.tokenizer.save_pretrained(str(path))

    def _run(
        self,
        config: RunConfig,
        rows: _Rows,
        folder: RunFolder | None,
        resume: Path | None,
        plan: Plan | None = None,
    ) -> dict[str, float]:
        device, state = pick_device(config.device), streamed(self.model)
        if plan is None:
            plan = plan_run(config, device, state)
            _say(self._console, *plan.lines())
        self.plan, self._folder = plan, folder.path if folder is not None else None
        if config.quantization == "int8":
            _say(self._console, "int8 does not stream: the whole base is on the device")
        elif state is None:
            state = _stream(self.model, plan.num_slots, config.micro_rows, device)
            _say(self._console, *(f"note: {note}" for note in state.notes))
        for block in state.blocks if state is not None else ():
            block.micro_rows = config.micro_rows
        stop = StopOnSignal()
        progress = Progress(self._console, device, state, folder.path if folder else None)
        with tempfile.TemporaryDirectory() as temporary, own_forward(self.model):
            # The trainer makes its folder when it is built: the run's own only once all is checked.
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
            found = rows.check(trainer, self.tokenizer, config.max_seq_length)
            _say(self._console, *found)
            if folder is not None:
                folder.check_space(4 * plan.trainable_params)
                folder.start(_choices(device, plan, state), found)
                trainer.args.output_dir = str(folder.path)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                guard = folder.disk_errors() if folder is not None else contextlib.nullcontext()
                with guard, memory_errors(device, "training", plan), stop.listening():
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
        if resume is not None:
            _say(self._console, f"resuming from {resume}")
        elif trainer.eval_dataset is not None:
            results["eval_loss_before"] = float(trainer.evaluate()["eval_loss"])
            _say(self._console, f"held-out loss before: {results['eval_loss_before']:.4f}")
        if config.prompt is not None and resume is None:
            self._answer("before", config.prompt)
        if stop.stopped:
            raise KeyboardInterrupt
        result = trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
        results |= {key: float(value) for key, value in result.metrics.items()}
        state = trainer.state
        if stop.stopped and state.global_step < state.max_steps:
            kept = "nothing was kept: no output was given"
            if folder is not None:
                kept = f"checkpoint in {folder.path}\nresume: run the same command again"
            at = f"step {state.global_step} of {state.max_steps}"
            _say(self._console, f"stopped at {at}; {kept}")
            raise KeyboardInterrupt
        if folder is not None:  # before anything else can be interrupted
            self.save(folder.path)
            folder.finish(results)
            _say(self._console, f"adapter: {folder.path}")
        if trainer.eval_dataset is not None:
            results["eval_loss"] = float(trainer.evaluate()["eval_loss"])
            _say(self._console, f"held-out loss after: {results['eval_loss']:.4f}")
        if config.prompt is not None:
            self._answer("after", config.prompt)
        what, peak = peak_memory(trainer.args.device)
        results["peak_gib"] = peak
        assert self.plan is not None
        planned = self.plan.peak_bytes if what == "VRAM" else self.plan.host_bytes
        _say(self._console, f"peak {what}: {peak:.2f} GiB, predicted {format_bytes(planned)}")
        if folder is not None:
            folder.finish(results)
        return results

    def _answer(self, when: str, prompt: str) -> None:
        _say(self._console, f"{when}: {prompt}\n  {answer(self.model, self.tokenizer, prompt)}")


def plan_run(config: RunConfig, device: torch.device, state: Streamed | None = None) -> Plan:
    """The plan of a run on this machine, for a model that is streamed already if `state` says so.

    Raises:
        ConfigError: `target_modules` matches nothing.
        ModelError: the model's shape cannot be read.
        PorosOOMError: it does not fit; says what would.
    """
    options = config.plan_options()
    limit = parse_size(config.vram) if config.vram is not None else None
    if state is not None:
        options["block_size"] = state.stream.num_slots
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        if state is None:  # else what the process holds is the model, which is in the plan
            free -= torch.cuda.memory_allocated(device)
        limit = min(limit, free) if limit is not None else free
    return make_plan(
        read_model_shape(config.model, config.revision),
        vram_bytes=limit,
        device="cuda" if device.type == "cuda" else "cpu",
        context_bytes=0,
        **options,
    )


def train(config: RunConfig, console: Console | None = None) -> dict[str, float]:
    """Do what a run file says: check, plan, load, stream, train, save; resumes a stopped run.

    Nothing is written before every check has passed and the model is loaded.

    Raises:
        PorosError: any mistake of the run file, the data, the model or the machine.
        KeyboardInterrupt: stopped by the user; a checkpoint was kept if a step had been made.
    """
    console = console or Console()
    folder = RunFolder(config)
    resume = folder.open()
    check_names(config)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    rows = _Rows(config, tokenizer, config.data)
    plan = None
    try:
        plan = plan_run(config, device)
    except ModelError:
        # The shape of a rare family is told by its checkpoint alone, which is not here yet.
        if Path(config.model).is_dir():
            raise
    if plan is not None:
        _say(console, *plan.lines())
        folder.check_space(4 * plan.trainable_params)
    settings = config.model_dump(exclude={"data"})
    trainer = PorosTrainer.from_pretrained(console=console, **settings)
    return trainer._run(config, rows, folder, resume, plan)


class _Rows:
    """The data of a run and what was found about it."""

    def __init__(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, data: str | Path | Dataset
    ) -> None:
        kind = config.data_format
        if isinstance(data, str | Path):
            self.train, self.summary = load_rows(
                str(data), split=config.data_split, data_format=kind
            )
        else:
            with tempfile.TemporaryDirectory() as temporary:
                path = str(Path(temporary) / "dataset.parquet")
                data.to_parquet(path)
                self.train, self.summary = load_rows(path, data_format=kind)
            self.summary = dataclasses.replace(self.summary, source="dataset")
        self.held_out: Dataset | None = None
        self.held_summary: DataSummary | None = None
        if config.eval_data is not None:
            self.held_out, self.held_summary = load_rows(config.eval_data, data_format=kind)
        elif config.eval_rows:
            self.train, self.held_out = split_eval(self.train, config.eval_rows, config.seed)
            self.held_summary = dataclasses.replace(
                self.summary, source=f"held out of {self.summary.source}", notes=()
            )
        for part in (self.train, self.held_out):
            if part is not None:
                ensure_chat_template(tokenizer, part)

    def check(
        self, trainer: SFTTrainer, tokenizer: PreTrainedTokenizerBase, length: int
    ) -> list[str]:
        """Lines about what TRL made of the rows."""
        parts = [(trainer.train_dataset, self.train, self.summary)]
        if self.held_out is not None and self.held_summary is not None:
            parts.append((trainer.eval_dataset, self.held_out, self.held_summary))
        return [
            str(check_trainable(prepared, rows, summary, tokenizer, length))
            for prepared, rows, summary in parts
        ]


def _choices(device: torch.device, plan: Plan, state: Streamed | None) -> dict[str, Any]:
    return {
        "device": str(device),
        "compute_dtype": compute_dtype(device)[1],
        "slots": plan.slots_reason,
        "host_memory": state.store.reason if state is not None else None,
        "notes": state.notes if state is not None else [],
        "plan": plan.to_dict(),
    }


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
