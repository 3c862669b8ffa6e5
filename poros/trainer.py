"""A run's settings as TRL's `SFTTrainer`: arguments, adapter, callbacks. No training loop here.

TRL computes the loss from the hidden states in chunks and never holds the logits of a whole batch;
only the loss is evaluated (`prediction_loss_only`), so evaluation does not either.
"""

from __future__ import annotations

import difflib
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from trl import SFTConfig, SFTTrainer

from poros.config import RunConfig
from poros.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from datasets import Dataset


def compute_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, reason): bf16, or fp16 on a CUDA card whose hardware has no bf16."""
    if device.type != "cuda":
        return torch.bfloat16, "bf16: the device is the CPU"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "bf16: the card supports it"
    return torch.float16, "fp16 with loss scaling: the card has no bf16"


def add_adapter(base: PreTrainedModel, config: RunConfig) -> PeftModel:
    """LoRA adapters as `config` asks, initialised from `config.seed`, on an unstreamed base.

    Raises:
        ModelError: `target_modules` matches no module, or a module that cannot carry LoRA.
    """
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT divides by it: a float is fine
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(config.seed)
    try:
        model = get_peft_model(base, lora)
    except ValueError as error:
        names = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if _is_linear(m)})
        raise ModelError(
            f"target_modules {config.target_modules!r} cannot be used with {type(base).__name__}:"
            f" {str(error).splitlines()[0]}\nits linear layers are named: {', '.join(names)}"
        ) from error
    assert isinstance(model, PeftModel)
    if isinstance(config.target_modules, list):
        adapted: Any = model.base_model.targeted_module_names
        unused = [
            target
            for target in config.target_modules
            if not any(name == target or name.endswith(f".{target}") for name in adapted)
        ]
        if unused:
            raise ModelError(
                f"target_modules: {', '.join(unused)} matches no module of {type(base).__name__}"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"target_modules {config.target_modules!r} left nothing to train")
    return model


def check_names(config: RunConfig) -> None:
    """Check the settings that are names of transformers.

    Raises:
        ConfigError: an optimizer or a scheduler that transformers does not know.
    """
    faults = []
    for key, value, names in (
        ("optimizer", config.optimizer, [name.value for name in OptimizerNames]),
        ("lr_scheduler", config.lr_scheduler, [name.value for name in SchedulerType]),
    ):
        if value not in names:
            near = difflib.get_close_matches(value, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            faults.append(f"{key}: {value!r} is unknown to transformers; {hint}")
    if faults:
        raise ConfigError("\n".join(faults))


class _Trainer(SFTTrainer):
    """TRL's trainer, whose adapters keep their dtype when a run is resumed.

    PEFT loads a checkpoint's adapters as float32, TRL trains those of a quantised base in bf16: a
    resumed run would go on in another precision than it began.
    """

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        model = self.model
        assert model is not None
        before = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(*args, **kwargs)
        for name, parameter in model.named_parameters():  # PEFT puts new ones in their places
            if name in before:
                parameter.data = parameter.data.to(before[name])


def build_trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    *,
    output: str,
    train_data: Dataset,
    eval_data: Dataset | None,
    device: torch.device,
    callbacks: list[TrainerCallback],
) -> SFTTrainer:
    """TRL's trainer for `config`; tokenises the data, moves nothing, trains nothing yet."""
    dtype, _ = compute_dtype(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        args = SFTConfig(
            output_dir=output,
            max_steps=config.steps if config.steps is not None else -1,
            num_train_epochs=config.epochs,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler,
            warmup_steps=config.warmup_steps,
            optim=config.optimizer,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            max_length=config.max_seq_length,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            use_cpu=device.type == "cpu",
            # Each block recomputes inside its own visit already.
            gradient_checkpointing=config.quantization == "int8",
            logging_steps=config.log_steps,
            logging_nan_inf_filter=False,  # it would log the mean of the losses before in its place
            save_strategy="steps" if config.save_steps else "no",
            save_steps=config.save_steps or 500,
            save_total_limit=2,
            eval_strategy="steps" if config.eval_steps else "no",
            eval_steps=config.eval_steps or None,
            prediction_loss_only=True,
            dataloader_pin_memory=device.type == "cuda",
            disable_tqdm=True,
            report_to="none",
        )
        if device.type == "cuda":
            # Several visible GPUs would make the trainer split the batch over copies of the model.
            args._n_gpu = min(args.n_gpu, 1)
        if (model_config := getattr(model, "config", None)) is not None:
            # The router's auxiliary loss is computed from tensors inside the blocks, whose graph
            # does not leave their visit; the frozen routers do not learn from it either.
            text = model_config.get_text_config()
            if hasattr(text, "output_router_logits"):
                args.router_aux_loss_coef = 0.0
        trainer = _Trainer(
            model=model,
            args=args,
            processing_class=tokenizer,
            train_dataset=train_data,
            eval_dataset=eval_data,
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)  # prints each log as a dict
    if dtype is torch.float16:
        # TRL has just made the adapters of a 4-bit base bf16, which loss scaling cannot handle.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return trainer


class StopOnSignal(TrainerCallback):
    """Ctrl-C ends the run behind the present step, with a checkpoint; a second one at once.

    Outside of training, where there is nothing to keep, the first one ends an evaluation at once.
    """

    def __init__(self) -> None:
        self.stopped = self._training = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear SIGINT and SIGTERM while the block runs (in the main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._hear) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        if self._training:
            # Not through the console, which may be in the middle of a line and would repeat it.
            text = "stopping behind this step, with a checkpoint; once more: at once, without"
            os.write(2, f"\n{text}\n".encode())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """From here on there is something to keep."""
        self._training = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """What was trained is the caller's to keep now."""
        self._training = False

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """End an evaluation before or after training if a signal came."""
        if self.stopped and not self._training:
            raise KeyboardInterrupt

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """End the run with a checkpoint if a signal came."""
        if self.stopped:
            control.should_training_stop = True
            control.should_save = True
        return control


@contextmanager
def own_forward(model: PeftModel) -> Iterator[None]:
    """Take off again what trainers put over a model's forward: autocast, TRL's fused head.

    Left on, they would pile up from one training to the next, and `model(...)` would give other
    numbers than `model.generate(...)`, which passes them by.
    """
    before = [(m, m.__dict__.get("forward")) for m in (model, model.get_base_model())]
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
        model.__dict__.pop("_original_forward", None)  # accelerate's


def answer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 40,
) -> str:
    """The model's greedy continuation of `prompt` (through its chat template if it has one)."""
    device = next(parameter.device for parameter in model.parameters())
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    training = model.training
    generate: Any = model.generate  # PEFT passes it on
    model.eval()
    try:
        with torch.no_grad():
            output = generate(
                input_ids=inputs["input_ids"].to(device),
                attention_mask=inputs["attention_mask"].to(device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
    finally:
        model.train(training)
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
