"""The training path end to end: modes, users' own scripts, the run folder, stops and resumes.

Everything numeric is compared with an ordinary `from_pretrained` + PEFT model by `torch.equal`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import poros
from poros import api
from poros.config import RunConfig, make_config
from poros.core.attach import streamed
from poros.errors import ConfigError, ModelError, OutputError
from poros.loader import nf4_config
from poros.trainer import build_trainer

NUM_TENSORS = 5 * 7 * 2  # of the tiny qwen2: lora_A and lora_B of seven linears a block
WORDS = "a be sea deep ear far green house ink jar".split()


# -- models and data -------------------------------------------------------------------------------


def plain_base(model: Path, quantization: str = "nf4") -> Any:
    quantised = {"quantization_config": nf4_config()} if quantization == "nf4" else {}
    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map={"": "cpu"}, **quantised
    )
    for module in base.modules():
        # In eval mode on a CPU with AVX512-BF16, bitsandbytes repacks a weight with rounding.
        # Streaming switches that off; a reference must not do it either.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base


def with_adapter(base: Any, dropout: float = 0.0) -> PeftModel:
    """PEFT's adapter with a random lora_B: at zero it would change nothing."""
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.normal_(std=0.02, generator=generator)
    return model


def resident(model: Path, quantization: str = "nf4", dropout: float = 0.0) -> PeftModel:
    return with_adapter(plain_base(model, quantization), dropout)


def streaming(model: Path, quantization: str = "nf4", dropout: float = 0.0) -> PeftModel:
    base = poros.load(str(model), quantization=quantization, device="cpu")
    return poros.stream(with_adapter(base, dropout), 2, device="cpu", poison=True)


def tokens(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(seed))


def token_rows(count: int, length: int = 20) -> Dataset:
    ids = tokens(count, length).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def differing(one: dict[str, Any], two: dict[str, Any], count: int = NUM_TENSORS) -> list[str]:
    assert one.keys() == two.keys() and len(one) == count
    return [name for name in one if not torch.equal(one[name], two[name])]


def visits(model: torch.nn.Module) -> int:
    state = streamed(model)
    assert state is not None
    return state.stream.stats.visits


def num_blocks(model: torch.nn.Module) -> int:
    state = streamed(model)
    assert state is not None
    return len(state.blocks)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [
        {"prompt": " ".join(WORDS[i % 7 :][:3]), "completion": " ".join(WORDS[i % 5 :][:4])}
        for i in range(14)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def configure(model: Path, data: Path, output: Path, **settings: Any) -> RunConfig:
    settings = {
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "learning_rate": 1e-2,
        "batch_size": 2,
        "max_seq_length": 64,
        "steps": 3,
        "device": "cpu",
        **settings,
    }
    return make_config({"model": str(model), "data": str(data), "output": str(output), **settings})


def quiet() -> Console:
    return Console(record=True, width=200, file=open(os.devnull, "w"))


def trainer_of(model: Path, **settings: Any) -> poros.PorosTrainer:
    settings = {"lora_rank": 4, "learning_rate": 1e-2, "batch_size": 2, **settings}
    return poros.PorosTrainer.from_pretrained(str(model), device="cpu", console=quiet(), **settings)


@pytest.fixture(params=["tiny_qwen2", pytest.param("smollm2", marks=pytest.mark.slow)])
def model_folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_evaluation_and_generation(model_folder: Path, quantization: str) -> None:
    expected = resident(model_folder, quantization).eval()
    model = streaming(model_folder, quantization).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    prompts = tokenizer(["far", "deep green sea"], return_tensors="pt", padding=True)
    assert not prompts["attention_mask"].all(), "one prompt must be padded"
    ids = tokens(2, 24)
    how: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    found = []
    for one in (expected, model):
        with torch.no_grad():
            loss = one(ids, labels=ids).loss
        with torch.inference_mode():
            logits = one(**prompts).logits
        generated = one.generate(**prompts, **how)
        found.append((loss, logits, generated))
    (loss, logits, generated), (loss_s, logits_s, generated_s) = found
    assert torch.equal(loss, loss_s) and torch.equal(logits, logits_s)
    assert torch.equal(generated.sequences, generated_s.sequences)
    assert len(generated.logits) == len(generated_s.logits) > 1
    pairs = zip(generated.logits, generated_s.logits, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # The loss, the logits, and one forward a new token: the cache is used.
    assert visits(model) == num_blocks(model) * (2 + len(generated_s.logits))


def preference_loss(model: PeftModel) -> torch.Tensor:
    """As DPO does it: two forwards with the adapter, one without between, one backward."""

    def score(seed: int) -> torch.Tensor:
        ids = tokens(2, 16, seed)
        logits = model(ids).logits[:, :-1].float().log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).sum()

    chosen = score(1)
    with torch.no_grad(), model.disable_adapter():
        reference = score(1) - score(2)
    rejected = score(2)
    return -torch.nn.functional.logsigmoid(0.01 * (chosen - rejected - reference))


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_two_forwards_before_one_backward(tiny_qwen2: Path, quantization: str) -> None:
    found = []
    for build in (resident, streaming):
        model = build(tiny_qwen2, quantization, dropout=0.1).train()
        torch.manual_seed(7)
        loss = preference_loss(model)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert differing(found[0][1], found[1][1]) == []
    assert all(bool(g.any()) for g in found[0][1].values())


def train_steps(model: PeftModel, steps: int, seed: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    torch.manual_seed(seed)
    losses = []
    for step in range(steps):
        ids = tokens(2, 16, seed + step)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def evaluate(model: PeftModel) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens(2, 16)).logits
    return logits


def test_training_and_evaluation_in_turn_then_unstreamed(tiny_qwen2: Path) -> None:
    expected, model = resident(tiny_qwen2, dropout=0.1), streaming(tiny_qwen2, dropout=0.1)
    for turn in range(2):
        losses = [train_steps(one, 2, 10 * turn) for one in (expected, model)]
        assert losses[0] == losses[1] and len(losses[0]) == 2
        assert torch.equal(evaluate(expected), evaluate(model))
    whole = expected.state_dict()
    assert differing(whole, model.state_dict(), len(whole)) == []

    keys = {n: type(m) for n, m in model.named_modules()}
    assert poros.unstream(model) is model and streamed(model) is None
    assert keys == {n: type(m) for n, m in expected.named_modules()}
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert differing(whole, model.state_dict(), len(whole)) == []
    for module in model.modules():  # it is an ordinary model again, with the rounding of above
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    assert torch.equal(evaluate(expected), evaluate(model))
    assert train_steps(expected, 2, 30) == train_steps(model, 2, 30)
    assert differing(trained_weights(expected), trained_weights(model)) == []
    with pytest.raises(ModelError, match="not streamed"):
        poros.unstream(model)


def test_a_resident_model_streams_like_a_loaded_one(tiny_qwen2: Path) -> None:
    model = poros.stream(resident(tiny_qwen2), 3, device="cpu")
    loaded = streaming(tiny_qwen2)
    standard = poros.load(str(tiny_qwen2), nf4_load_strategy="standard", device="cpu")
    standard = poros.stream(with_adapter(standard), 1, device="cpu")
    whole = loaded.state_dict()
    assert any("quant_map" in name for name in whole) and any("absmax" in name for name in whole)
    for other in (model, standard):
        assert differing(whole, other.state_dict(), len(whole)) == []
        assert torch.equal(evaluate(loaded), evaluate(other))


def test_streaming_says_what_it_cannot_do(tiny_qwen2: Path) -> None:
    with pytest.warns(UserWarning, match="block_size 9 is more than the 5 blocks"):
        model = poros.stream(resident(tiny_qwen2), 9, device="cpu")
    state = streamed(model)
    assert state is not None and state.stream.num_slots == 5
    with pytest.raises(ModelError, match="streamed already"):
        poros.stream(model, device="cpu")
    bare = poros.load(str(tiny_qwen2), quantization="bf16", device="cpu")
    with pytest.raises(ModelError, match=r"every parameter of model\.layers is trainable"):
        poros.stream(bare, device="cpu")


# -- under a user's own script ---------------------------------------------------------------------


def sft(model: PeftModel, folder: Path) -> SFTTrainer:
    args = SFTConfig(  # gradient_checkpointing is on by default
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
    )
    assert args.gradient_checkpointing
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    return SFTTrainer(
        model=model, args=args, train_dataset=token_rows(12), processing_class=tokenizer
    )


def plain_trainer(model: PeftModel, folder: Path) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
    )
    return Trainer(model=model, args=args, train_dataset=token_rows(12))


@pytest.mark.parametrize("build", [sft, plain_trainer])
def test_one_line_in_a_script(tiny_qwen2: Path, tmp_path: Path, build: Any) -> None:
    found = []
    for stream in (False, True):
        model = resident(tiny_qwen2, dropout=0.1)
        if stream:
            model = poros.stream(model, 2, device="cpu")
        trainer = build(model, tmp_path)
        trainer.train()
        logs = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history[:3]]
        found.append((logs, trained_weights(model)))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 3
    assert differing(found[0][1], found[1][1]) == []
    # A forward and a backward visit a micro-batch: nothing is recomputed twice.
    assert visits(model) == num_blocks(model) * 2 * 3 * 2


# -- PorosTrainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_the_saved_adapter_on_a_plain_base(
    model_folder: Path, rows_file: Path, tmp_path: Path, quantization: str
) -> None:
    trainer = trainer_of(model_folder, quantization=quantization)
    trainer.train(rows_file, steps=3, seq_len=64)
    trainer.save(tmp_path / "adapter")
    model, trained = trainer.model.eval(), trained_weights(trainer.model)
    assert any(w.any() for n, w in trained.items() if "lora_B" in n), "it must have learned"

    # TRL trains the adapter of a quantised base in bf16, which PEFT makes float32 unless it is
    # told not to. That of a bf16 base is float32, and keeps its bits by PEFT's default.
    kept = {"autocast_adapter_dtype": quantization == "bf16"}
    loaded = PeftModel.from_pretrained(
        plain_base(model_folder, quantization), tmp_path / "adapter", **kept
    ).eval()
    result = loaded.load_adapter(tmp_path / "adapter", "default", **kept)
    assert not result.missing_keys and not result.unexpected_keys
    weights = {n: p.detach() for n, p in loaded.named_parameters() if "lora_" in n}
    assert differing(trained, weights, num_blocks(model) * 7 * 2) == []
    ids = tokens(2, 24)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)

    # With PEFT's default the numbers are the same wherever training's autocast is on.
    default = PeftModel.from_pretrained(
        plain_base(model_folder, quantization), tmp_path / "adapter"
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(default.eval()(ids).logits, model(ids).logits)


def test_train_twice_then_generate_and_save(
    tiny_qwen2: Path, rows_file: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(tiny_qwen2, block_size=4)
    first = trainer.train(str(rows_file), steps=2, seq_len=64)
    between = trained_weights(trainer.model)
    state = streamed(trainer.model)
    assert state is not None and state.stream.num_slots == 4
    table = Dataset.from_json(str(rows_file))
    second = trainer.train(table, steps=2, seq_len=64, eval_rows=4, eval_steps=1, micro_rows=1)
    assert streamed(trainer.model) is state and state.blocks[0].micro_rows == 1
    assert len(differing(between, trained_weights(trainer.model))) == NUM_TENSORS
    assert second["train_loss"] < first["train_loss"]
    assert second["eval_loss"] < second["eval_loss_before"]
    # Nothing of the trainers stays on the model, so both ways to call it give the same numbers.
    assert "forward" not in trainer.model.__dict__
    model = trainer.model.eval()
    ids = tokens(1, 12)
    with torch.no_grad():
        logits = model(ids).logits
    how = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(
        input_ids=ids, output_logits=True, return_dict_in_generate=True, **how
    )
    assert torch.equal(generated.logits[0], logits[:, -1].float())
    trainer.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    with pytest.raises(OutputError, match="holds another run"):
        trainer.save(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["run.json"]
    with pytest.raises(ConfigError, match="lora_rank, block_size: decided already"):
        trainer.train(rows_file, steps=1, lora_rank=8, block_size=1)


def test_int8_trains_resident_and_says_so(tiny_qwen2: Path, rows_file: Path) -> None:
    trainer = trainer_of(tiny_qwen2, quantization="int8")
    with pytest.raises(ModelError, match="is int8, which does not stream"):
        poros.stream(trainer.model, device="cpu")
    results = trainer.train(rows_file, steps=3, seq_len=64, eval_rows=2)
    assert streamed(trainer.model) is None
    assert "int8 does not stream" in trainer._console.export_text()
    assert results["eval_loss"] < results["eval_loss_before"]


def test_several_visible_gpus_do_not_split_the_batch(
    tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments as on a machine of four GPUs: left so, the trainer would copy the model to each."""

    def seeing_four(**given: Any) -> SFTConfig:
        args = SFTConfig(**{**given, "use_cpu": True, "dataloader_pin_memory": False})
        args._n_gpu = 4
        return args

    monkeypatch.setattr("poros.trainer.SFTConfig", seeing_four)
    monkeypatch.setattr("poros.trainer.compute_dtype", lambda _: (torch.bfloat16, "of the test"))
    model, tokenizer = streaming(tiny_qwen2), AutoTokenizer.from_pretrained(tiny_qwen2)
    config = configure(tiny_qwen2, tmp_path, tmp_path)

    def build(device: str) -> SFTTrainer:
        return build_trainer(
            model,
            tokenizer,
            config,
            output=str(tmp_path),
            train_data=token_rows(4),
            eval_data=None,
            device=torch.device(device),
            callbacks=[],
        )

    assert build("cuda").args.n_gpu == 1
    with pytest.raises(ValueError, match="DataParallel"):
        build("cpu")  # where nothing holds the count down


# -- the run folder, stops and resumes -------------------------------------------------------------

RUN: dict[str, Any] = {"steps": 6, "gradient_accumulation_steps": 2, "eval_rows": 2}


class Interrupt(TrainerCallback):
    """Ctrl-C in the middle of a step, or in an evaluation."""

    at_step: int | None = None
    in_evaluation = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at_step:
            signal.raise_signal(signal.SIGINT)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self.in_evaluation:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Joins the callbacks of every trainer that is built."""
    callback = Interrupt()

    def build(*args: Any, callbacks: list[TrainerCallback], **given: Any) -> SFTTrainer:
        return build_trainer(*args, callbacks=[callback, *callbacks], **given)

    monkeypatch.setattr(api, "build_trainer", build)
    return callback


def run(config: RunConfig) -> str:
    """What `poros train` shows of a run."""
    console = quiet()
    try:
        api.train(config, console)
    finally:
        shown = console.export_text()
    return shown


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_a_stopped_run_goes_on_to_the_same_bits(
    tiny_qwen2: Path,
    rows_file: Path,
    tmp_path: Path,
    interrupt: Interrupt,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole = configure(tiny_qwen2, rows_file, tmp_path / "whole", **RUN)
    shown = run(whole)
    assert "predicted" in shown and "step 6/6" in shown and "adapter: " in shown
    assert names(tmp_path / "whole") >= {"run.json", "metrics.jsonl", "adapter_config.json"}

    config = configure(tiny_qwen2, rows_file, tmp_path / "stopped", **RUN)
    interrupt.at_step = 2
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert "stopping behind this step, with a checkpoint" in capfd.readouterr().err
    assert "checkpoint-3" in names(tmp_path / "stopped")
    assert "adapter_model.safetensors" not in names(tmp_path / "stopped")

    interrupt.at_step = None
    data = rows_file.read_text()
    rows_file.write_text(data + data.splitlines()[0])
    with pytest.raises(OutputError, match=r"(?s)other data:.*12 prompt.*13 prompt"):
        run(config)
    rows_file.write_text(data)
    shown = run(config)
    assert f"resuming from {tmp_path / 'stopped' / 'checkpoint-3'}" in shown
    assert "step 3/6" not in shown and "step 4/6" in shown
    one, two = adapter_of(tmp_path / "whole"), adapter_of(tmp_path / "stopped")
    assert differing(one, two) == []
    assert {tensor.dtype for tensor in two.values()} == {torch.bfloat16}
    with pytest.raises(OutputError, match="holds this run, finished on"):
        run(config)
    with pytest.raises(OutputError, match=r"learning_rate: 0.01 there, 0.5 now"):
        run(config.model_copy(update={"learning_rate": 0.5}))


def test_ctrl_c_in_an_evaluation(
    tiny_qwen2: Path, rows_file: Path, tmp_path: Path, interrupt: Interrupt
) -> None:
    config = configure(tiny_qwen2, rows_file, tmp_path / "out", **{**RUN, "steps": 1})
    interrupt.in_evaluation = True
    with pytest.raises(KeyboardInterrupt):  # before training: there is nothing to keep
        run(config)
    assert names(tmp_path / "out") == {"run.json"}
    interrupt.in_evaluation = False
    interrupt.on_train_end = lambda *_, **__: setattr(interrupt, "in_evaluation", True)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):  # after it: the adapter is there
        run(config)
    assert len(adapter_of(tmp_path / "out")) == NUM_TENSORS
    assert json.loads((tmp_path / "out" / "run.json").read_text())["finished"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_damaged_checkpoint_is_named(
    tiny_qwen2: Path, rows_file: Path, tmp_path: Path, interrupt: Interrupt, name: str
) -> None:
    output = tmp_path / "out"
    config = configure(tiny_qwen2, rows_file, output, **{**RUN, "steps": 3, "save_steps": 1})
    interrupt.at_step = 1
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert {"checkpoint-1", "checkpoint-2"} <= names(output)
    cut(output / "checkpoint-2" / name)
    match = rf"(?s)checkpoint-2 is damaged: .*{name}.*goes on from checkpoint-1"
    with pytest.raises(OutputError, match=match):
        run(config)
    interrupt.at_step = None
    shutil.rmtree(output / "checkpoint-2")
    (output / "checkpoint-2").mkdir()  # as a checkpoint that was never finished leaves it
    assert "resuming from" in run(config)
    assert "checkpoint-3" in names(output) and len(adapter_of(output)) == NUM_TENSORS


def test_nothing_is_written_before_every_check_has_passed(
    tiny_qwen2: Path, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "out"

    def build(*args: Any, **given: Any) -> SFTTrainer:
        trainer = build_trainer(*args, **given)
        assert Path(trainer.args.output_dir).is_dir() and not output.parent.exists()
        return trainer

    monkeypatch.setattr(api, "build_trainer", build)
    run(configure(tiny_qwen2, rows_file, output, steps=2, save_steps=1))
    assert {"checkpoint-1", "checkpoint-2", "run.json", "adapter_config.json"} <= names(output)
    record = json.loads((output / "run.json").read_text())
    assert record["finished"] and record["choices"]["plan"]["num_slots"] == 2
    assert record["versions"]["torch"]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def command(model: Path, data: Path, output: Path) -> list[str]:
    file = output.parent / "run.yaml"
    file.write_text(
        f"model: {model}\ndata: {data}\noutput: {output}\ndevice: cpu\nsteps: 200\nlora_rank: 4\n"
        "batch_size: 2\nmax_seq_length: 64\nquantization: nf4\n"
    )
    return [sys.executable, "-m", "poros", "train", str(file)]


@pytest.mark.slow
def test_ctrl_c_on_the_command_line(tiny_qwen2: Path, rows_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(tiny_qwen2, rows_file, output),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background job, which CI may be, starts with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def until(process: subprocess.Popen[str], text: str) -> None:
        assert process.stdout is not None
        assert any(line.startswith(text) for line in process.stdout), f"{text} was never shown"

    process = start()
    until(process, "step time")  # the plan is out, the model is being loaded
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert not output.exists()

    process = start()
    until(process, "step 2/200")
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "resume: run the same command again" in shown
    assert any(name.startswith("checkpoint-") for name in names(output))

    process = start()
    until(process, "resuming from")
    process.terminate()
    process.communicate(timeout=60)
