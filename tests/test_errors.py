"""Bad input: one clear error (found, wanted, what to do), its exit code, and nothing written."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from poros.cli import app
from poros.core.block import Block
from poros.errors import PorosOOMError
from poros.loader import memory_errors
from poros.units import GIB

GOOD = {"prompt": "far sea", "completion": "deep green"}

Train = Callable[..., str]


@pytest.fixture
def train(tiny_qwen2: Path, tmp_path: Path) -> Train:
    """`poros train` on a good run with one thing changed: what stderr says behind `error: `."""
    write_rows(tmp_path / "rows.jsonl", *[GOOD] * 6)
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {tiny_qwen2}\ndata: {tmp_path}/rows.jsonl\noutput: {tmp_path}/out\ndevice: cpu\n"
        "steps: 2\nlora_rank: 4\nbatch_size: 2\nmax_seq_length: 64\n"
    )

    def run_it(*overrides: str, code: int = 2, kept: tuple[str, ...] = ()) -> str:
        result = CliRunner().invoke(app, ["train", str(run), *overrides])
        assert result.exit_code == code, (result.output, result.exception)
        out = tmp_path / "out"
        held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
        assert held == sorted(kept)
        if code == 0:
            return result.stdout
        message = result.stderr[result.stderr.index("error: ") :]
        assert message.count("error: ") == 1 and "Traceback" not in result.output
        return message

    return run_it


def write_rows(path: Path, *rows: Any) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder))


def test_the_run_itself_is_good(train: Train, tmp_path: Path) -> None:
    """Without it every test below could fail for another reason than the one it names."""
    shown = train("block_size=99", "output=" + str(tmp_path / "good"), code=0)
    assert "slots: 5 of 5 blocks on the device (clamped from 99 to 5" in shown
    assert "step 2/2" in shown


# -- settings --------------------------------------------------------------------------------------


def test_settings_all_at_once(train: Train) -> None:
    shown = train("lora_rnk=3", "steps=many", "block_size=0", "epochs=-1")
    assert "lora_rnk: unknown key; did you mean lora_rank?" in shown
    assert "steps: found 'many' (text)" in shown
    assert "block_size: found 0" in shown and "1 or more" in shown
    assert "epochs: found -1" in shown


def test_names_of_transformers(train: Train) -> None:
    shown = train("optimizer=adamw_troch", "lr_scheduler=zzz")
    assert "'adamw_troch' is unknown to transformers; did you mean adamw_torch?" in shown
    assert "lr_scheduler: 'zzz' is unknown to transformers; known: linear, cosine" in shown


def test_a_misspelt_target_beside_a_right_one(train: Train) -> None:
    assert "target_modules: v_prj matches no module" in train("target_modules=[q_proj, v_prj]")


def test_targets_that_match_nothing(train: Train) -> None:
    shown = train("target_modules=[nothing, here]")
    assert "nothing" in shown and "q_proj" in shown and "all-linear" in shown


def test_cuda_where_there_is_none(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = train("device=cuda")
    assert "sees no CUDA device" in shown and "set device: cpu" in shown


# -- the model -------------------------------------------------------------------------------------


def test_no_such_model(train: Train, tmp_path: Path) -> None:
    assert "there is no such folder" in train(f"model={tmp_path}/nowhere")
    assert "rows.jsonl is a file; wanted a model folder" in train(f"model={tmp_path}/rows.jsonl")
    (tmp_path / "empty").mkdir()
    shown = train(f"model={tmp_path}/empty")
    assert "wanted a folder with a config.json" in shown and "found none" in shown
    (tmp_path / "empty" / "adapter_config.json").touch()
    assert "name the model that it was trained on" in train(f"model={tmp_path}/empty")


def test_a_hub_id_offline_does_not_wait(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a network and without HF_HUB_OFFLINE, where each file would cost 23 seconds."""

    def no_network(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Name or service not known")

    retries: list[float] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("poros.loader.HfApi.model_info", no_network)
    monkeypatch.setattr("time.sleep", retries.append)
    shown = train("model=no-organisation/no-such-model")
    assert "model no-organisation/no-such-model: its tokenizer cannot be loaded" in shown
    assert "offline, only what is in the cache or in a folder is found" in shown
    assert retries == []


def test_a_damaged_model(train: Train, tiny_qwen2: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_qwen2, tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is no whole safetensors file" in train(f"model={model}")
    weights.write_bytes(b"A" * 16 + whole[16:])
    assert "model.safetensors is no whole safetensors file" in train(f"model={model}")
    weights.unlink()
    shown = train(f"model={model}")
    assert f"model {model}: it cannot be loaded" in shown and "model.safetensors" in shown
    (model / "config.json").write_text('{"model_type": "qw')
    assert "config.json" in train(f"model={model}")


def test_a_model_without_a_tokenizer(train: Train, tiny_qwen2: Path, tmp_path: Path) -> None:
    model = copy_of(tiny_qwen2, tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "its tokenizer has no vocabulary; wanted tokenizer files" in train(f"model={model}")


def test_a_model_without_a_block_list(train: Train, tiny_qwen2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, OpenAIGPTConfig, OpenAIGPTLMHeadModel

    model = tmp_path / "gpt"
    config = OpenAIGPTConfig(vocab_size=259, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    OpenAIGPTLMHeadModel(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_qwen2).save_pretrained(model)
    shown = train(f"model={model}")
    assert "no list of decoder layers" in shown and "transformer.h (2 x Block)" in shown


# -- the data --------------------------------------------------------------------------------------


def test_no_data(train: Train, tmp_path: Path) -> None:
    shown = train(f"data={tmp_path}/row.jsonl")
    assert "no such file" in shown and "near it: rows.jsonl" in shown
    write_rows(tmp_path / "empty.jsonl")
    assert "empty.jsonl has no row to train on" in train(f"data={tmp_path}/empty.jsonl")
    assert "leaves no row to train on" in train("eval_rows=6")
    shown = train("data=no-organisation/no-such-data")
    assert "no-such-data is no file here, the hub cannot be reached" in shown


def test_a_malformed_row(train: Train, tmp_path: Path) -> None:
    write_rows(tmp_path / "bad.jsonl", GOOD, '{"prompt": ', {"prompt": 3, "completion": "x"})
    shown = train(f"data={tmp_path}/bad.jsonl")
    assert "2 bad rows" in shown and "bad.jsonl line 2: not JSON" in shown
    assert "bad.jsonl line 3: " in shown


def test_a_row_with_nothing_to_learn(train: Train, tmp_path: Path) -> None:
    lost = {"prompt": "far " * 40, "completion": "x"}
    write_rows(tmp_path / "lost.jsonl", *[GOOD] * 4, lost)
    shown = train(f"data={tmp_path}/lost.jsonl")
    assert "1 of 5 rows have no token to learn from within max_seq_length=64" in shown
    assert "such as lost.jsonl line 5: 'far far" in shown
    # Held-out rows are held to the same: their loss would be a number about fewer rows.
    shown = train(f"eval_data={tmp_path}/lost.jsonl")
    assert "1 of 5 rows have no token to learn from" in shown


# -- the output ------------------------------------------------------------------------------------


def test_an_output_that_is_taken(train: Train, tmp_path: Path) -> None:
    assert "is a file" in train(f"output={tmp_path}/rows.jsonl")
    assert f"{tmp_path}/rows.jsonl is a file" in train(f"output={tmp_path}/rows.jsonl/out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    shown = train(kept=("thesis.txt",))
    assert "is not empty and holds no run of Poros" in shown and "new or empty" in shown


def test_a_full_disk(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    shown = train()
    assert "the disk has 1000 B free and the run may write" in shown
    assert "another disk" in shown


# -- while it runs ---------------------------------------------------------------------------------

STARTED = ("metrics.jsonl", "run.json")


def test_a_disk_that_fills_up_in_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    original = transformers.Trainer._save_rng_state

    def full(self: Any, folder: str) -> None:
        if folder.endswith("-2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(transformers.Trainer, "_save_rng_state", full)
    kept = ("README.md", "checkpoint-1", "checkpoint-2", "metrics.jsonl", "run.json")
    message = train("save_steps=1", kept=kept)
    assert "the disk is full" in message and "whole checkpoint is checkpoint-1" in message


def test_a_loss_that_is_no_number(train: Train) -> None:
    shown = train("learning_rate=1e30", "steps=6", "max_grad_norm=0", kept=STARTED)
    assert "the loss became nan at step 2" in shown and "learning_rate" in shown
    # The advice must work: another rate is another run, which the folder refuses.
    assert "another output" in shown
    assert "name another output" in train("learning_rate=1e-4", kept=STARTED)


def test_out_of_memory_in_training(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a")

    monkeypatch.setattr(Block, "__call__", call)
    shown = train(kept=("run.json",))
    assert "out of memory on cpu while training: CUDA out of memory. Tried to allocate" in shown
    assert "planned: slots" in shown and "next: halve block_size (4 -> 2 -> 1)" in shown


def test_out_of_memory_on_a_card_names_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 6 * GIB)
    message = "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of"
    with (
        pytest.raises(PorosOOMError) as caught,
        memory_errors(torch.device("cuda", 0), "training"),
    ):
        raise torch.OutOfMemoryError(message)
    assert caught.value.needed == int(8.5 * GIB) and caught.value.free == 7 * GIB
    assert "needed 8.50 GiB, free 7.00 GiB (1.50 GiB short)" in str(caught.value)
    assert caught.value.terms == {
        "held by this process": 5 * GIB,
        "free on the card": GIB,
        "of": 8 * GIB,
    }
