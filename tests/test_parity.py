"""Streamed equals resident, bit for bit: the same trainer, the same seeds, `torch.equal`.

The reference is an untouched `from_pretrained(BitsAndBytesConfig)` model with PEFT's adapter. Only
the training loop (TRL's SFTTrainer, as `poros train` builds it) is shared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import poros
from poros.config import RunConfig, make_config
from poros.core.attach import find_blocks, streamed
from poros.loader import load, nf4_config
from poros.trainer import add_adapter, build_trainer

STEPS = 5


def rows(count: int, length: int) -> Dataset:
    """Token rows of one length, so that row chunks of a batch see no other padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 250, (count, length), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


@dataclass
class Trace:
    """Everything that a run of the trainer leaves to compare."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


class Watch(TrainerCallback):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.gradients = model, []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.gradients.append(
            {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        )


def configure(model: Path, **settings: Any) -> RunConfig:
    return make_config(
        {
            "model": str(model),
            "data": "rows of the test",
            "lora_rank": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.1,
            "steps": STEPS,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
            **settings,
        }
    )


def adapter(base: Any, config: RunConfig) -> PeftModel:
    """PEFT's adapter with a random lora_B: zeros would make every gradient of lora_A zero."""
    model = add_adapter(base, config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    # In eval mode bitsandbytes would repack the weights of the CPU reference, with rounding.
    return model.train()


def reference(config: RunConfig) -> PeftModel:
    quantised = {"quantization_config": nf4_config()} if config.quantization == "nf4" else {}
    base = AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.bfloat16, device_map={"": config.device}, **quantised
    )
    return adapter(base, config)


def streaming(config: RunConfig, slots: int, **settings: Any) -> PeftModel:
    base = load(config.model, quantization=config.quantization, device=config.device)
    return poros.stream(adapter(base, config), slots, device=config.device, **settings)


def train(model: PeftModel, config: RunConfig, folder: Path, length: int = 24) -> Trace:
    watch = Watch(model)
    trainer = build_trainer(
        model,
        AutoTokenizer.from_pretrained(config.model),
        config,
        output=str(folder),
        train_data=rows(STEPS * config.batch_size * config.gradient_accumulation_steps, length),
        eval_data=None,
        device=torch.device(config.device),
        callbacks=[watch],
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    state = trainer.optimizer.state_dict()["state"]
    optimizer = {f"{index}.{key}": value for index, s in state.items() for key, value in s.items()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if n in set(names)}
    return Trace(
        [row["loss"] for row in logs],
        [row["grad_norm"] for row in logs],
        watch.gradients,
        weights,
        optimizer,
    )


def compare(one: Trace, two: Trace, num_tensors: int) -> None:
    """Every surface equal, and as many tensors compared as the adapter has."""
    assert len(one.losses) == STEPS and one.losses == two.losses
    assert one.norms == two.norms and all(norm > 0 for norm in one.norms)
    assert len(one.gradients) == len(two.gradients) == STEPS
    for a, b in zip(one.gradients, two.gradients, strict=True):
        assert a.keys() == b.keys() and len(a) == num_tensors
        assert all(bool(g.any()) for g in a.values()), "a gradient of zeros proves nothing"
        assert [n for n in a if not torch.equal(a[n], b[n])] == []
    assert one.weights.keys() == two.weights.keys() and len(one.weights) == num_tensors
    assert [n for n in one.weights if not torch.equal(one.weights[n], two.weights[n])] == []
    assert one.optimizer.keys() == two.optimizer.keys() and len(one.optimizer) == 3 * num_tensors
    assert [k for k in one.optimizer if not torch.equal(one.optimizer[k], two.optimizer[k])] == []


@pytest.fixture(scope="module")
def reference_trace() -> Any:
    """The resident run of a model and precision, made once."""

    @functools.cache
    def run(model: Path, quantization: str, folder: Path) -> Trace:
        config = configure(model, quantization=quantization)
        return train(reference(config), config, folder)

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
@pytest.mark.parametrize("slots", [1, 2, 4, 5])
def test_tiny_qwen2(
    tiny_qwen2: Path, quantization: str, slots: int, runs: Path, reference_trace: Any
) -> None:
    config = configure(tiny_qwen2, quantization=quantization)
    model = streaming(config, slots, poison=slots < 5)
    trace = train(model, config, runs)
    compare(reference_trace(tiny_qwen2, quantization, runs), trace, num_tensors=5 * 7 * 2)
    state = streamed(model)
    assert state is not None and state.stream.num_slots == slots
    if slots == 5:
        assert state.stream.stats.loads == 5
    visits = state.stream.stats.visits
    assert visits == STEPS * 2 * 5, "one forward and one backward visit of each block a step"


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
@pytest.mark.parametrize("slots", [1, 2, 4, 30])
def test_smollm2(
    smollm2: Path, quantization: str, slots: int, runs: Path, reference_trace: Any
) -> None:
    config = configure(smollm2, quantization=quantization)
    model = streaming(config, slots)
    trace = train(model, config, runs)
    compare(reference_trace(smollm2, quantization, runs), trace, num_tensors=30 * 7 * 2)
    state = streamed(model)
    assert state is not None
    assert state.stream.stats.loads == slots + STEPS * 2 * (30 - slots)


def in_chunks(layer: torch.nn.Module, chunk: int) -> None:
    """Let a resident layer take its batch in row chunks, under ordinary autograd."""
    inner = layer.forward

    def forward(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        batch = hidden.shape[0]
        outputs = []
        for start in range(0, batch, chunk):
            part = {
                key: value[start : start + chunk]
                if isinstance(value, torch.Tensor) and value.shape[0] == batch
                else value
                for key, value in kwargs.items()
            }
            # Two forwards would cast a weight once each; a shared cast would add their
            # gradients in bf16.
            torch.clear_autocast_cache()
            outputs.append(inner(hidden[start : start + chunk], **part))
        return torch.cat(outputs)

    layer.forward = forward


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_micro_rows_under_the_trainer(tiny_qwen2: Path, quantization: str, runs: Path) -> None:
    """With dropout: a resident run that takes its rows through each layer in the same chunks."""
    config = configure(tiny_qwen2, quantization=quantization, batch_size=4)
    resident = reference(config)
    for layer in find_blocks(resident)[1]:
        in_chunks(layer, 2)
    expected = train(resident, config, runs)
    model = streaming(config, 2, micro_rows=2, poison=True)
    compare(expected, train(model, config, runs), num_tensors=70)


def test_micro_rows_are_ordinary_accumulation(tiny_qwen2: Path) -> None:
    """Three chunks, head and loss in the same chunks: the gradients of three small backwards."""
    config = configure(tiny_qwen2, lora_dropout=0.0)
    ids = torch.tensor(rows(6, 24)["input_ids"])
    total = ids[:, 1:].numel()

    def loss_of(model: PeftModel, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.get_base_model().lm_head(hidden)[:, :-1].float()
        return (
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            / total
        )

    resident = reference(config)
    for part in ids.split(2):
        hidden = resident.get_base_model().model(part, use_cache=False).last_hidden_state
        loss_of(resident, hidden, part).backward()

    model = streaming(config, 2, micro_rows=2)
    hidden = model.get_base_model().model(ids, use_cache=False).last_hidden_state
    parts = zip(hidden.split(2), ids.split(2), strict=True)
    torch.stack([loss_of(model, h, part) for h, part in parts]).sum().backward()

    one = {n: p.grad for n, p in resident.named_parameters() if p.grad is not None}
    two = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(one) == 70 and one.keys() == two.keys()
    assert [n for n in one if not torch.equal(one[n], two[n])] == []


def test_accumulation_and_gradient_checkpointing_switch(tiny_qwen2: Path, runs: Path) -> None:
    config = configure(tiny_qwen2, gradient_accumulation_steps=3)
    expected = train(reference(config), config, runs)
    model = streaming(config, 2)
    model.gradient_checkpointing_enable()  # as many scripts do: blocks recompute once all the same
    compare(expected, train(model, config, runs), num_tensors=70)
    state = streamed(model)
    assert state is not None and state.stream.stats.visits == STEPS * 3 * 2 * 5
