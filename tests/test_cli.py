"""The command line: exit codes, messages, and what works on a machine that cannot train."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import poros
from poros.cli import app
from poros.config import read_config
from poros.errors import DataError, PorosOOMError, StreamError
from poros.hardware import Driver, Gpu
from poros.units import GIB

ROW = '{"text": "a row"}\n'


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW * 3)
    path = tmp_path / "run.yaml"
    # A model whose published shape Poros knows: a plan of it needs no file.
    lines = ["model: smollm2-135m", f"data: {tmp_path}/rows.jsonl", f"output: {tmp_path}/out"]
    path.write_text("\n".join(lines))
    return path


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def trained(monkeypatch):
    """Stands where `poros.api` would be; `trained.train` may be replaced."""
    api = SimpleNamespace(configs=[])
    api.train = api.configs.append
    monkeypatch.setitem(sys.modules, "poros.api", api)
    monkeypatch.setattr(poros, "api", api, raising=False)
    return api


def test_version_and_help():
    assert call("--version").stdout == f"poros {poros.__version__}\n"
    shown = call("--help").stdout
    for name in ("doctor", "init", "check", "train", "plan"):
        assert name in shown


def test_init_then_check(tmp_path, run_file):
    path = tmp_path / "new.yaml"
    data = tmp_path / "rows.jsonl"
    assert f"poros check {path}" in call("init", path, "-m", "org/model", "-d", data).stdout
    assert read_config(path).model == "org/model"
    again = call("init", path, "-m", "other", "-d", "other", code=2)
    assert again.stderr.startswith(f"error: {path} exists already")
    assert read_config(path).model == "org/model"
    shown = call("check", run_file).stdout
    assert "3 text rows" in shown and "predicted peak" in shown
    assert not (tmp_path / "out").exists()


def test_check_reads_the_data(run_file, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW + "{broken\n")
    result = call("check", run_file, code=2)
    assert result.stderr.startswith("error: ") and "rows.jsonl line 2" in result.stderr
    (tmp_path / "held.jsonl").write_text(ROW * 2)
    (tmp_path / "rows.jsonl").write_text(ROW)
    shown = call("check", run_file, f"eval_data={tmp_path}/held.jsonl").stdout
    assert "rows.jsonl: 1 text rows" in shown and "held.jsonl: 2 text rows" in shown


def test_check_names_every_fault_of_the_settings(run_file):
    result = call("check", run_file, "lora_rnk=3", "steps=none", code=2)
    assert "did you mean lora_rank?" in result.stderr and "steps: found 'none'" in result.stderr
    assert result.stdout == ""


def test_check_refuses_what_training_would(run_file, tmp_path):
    # On a machine with a GPU nothing is too large for 1 MB either.
    shown = call("check", run_file, "vram=1MB", "device=cpu", code=2).stderr
    assert "does not fit" in shown and "next: " in shown
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert "not empty" in call("check", run_file, code=2).stderr
    shown = call("check", run_file, "model=no/such-model-anywhere", f"output={tmp_path}/o", code=2)
    assert "no/such-model-anywhere" in shown.stderr


def test_check_without_the_gpu_that_was_asked_for(run_file, monkeypatch):
    monkeypatch.setattr("poros.hardware.nvidia", lambda: ([], Driver(None, None)))
    assert "wanted cuda" in call("check", run_file, "device=cuda", code=2).stderr


def test_check_plans_for_the_free_memory_of_the_gpu(run_file, monkeypatch):
    gpus = [Gpu("card", 8 * GIB, 5 * GIB, "8.6")]
    monkeypatch.setattr("poros.hardware.nvidia", lambda: (gpus, Driver("580", "13.0")))
    assert "of 5.00 GiB" in call("check", run_file).stdout
    assert "of 2.00 GiB" in call("check", run_file, "vram=2GiB").stdout
    assert "of 5.00 GiB" not in call("check", run_file, "device=cpu").stdout


def test_plan():
    shown = call("plan", "-m", "Qwen/Qwen2.5-7B").stdout
    assert "28 blocks" in shown and "\n   12 GB  28 of 28 blocks" in shown
    shown = call("plan", "-m", "Qwen/Qwen2.5-7B", "--vram", "8GB", "block_size=2").stdout
    assert "slots: 2 of 28" in shown and "12 GB" not in shown
    assert "does not fit" in call("plan", "-m", "qwen2.5-72b", "--vram", "2GB", code=2).stderr
    shown = call("plan", "-m", "qwen2.5-7b", "--vram", "big", "lora_rnk=2", code=2).stderr
    assert "'big' is not a size" in shown and "did you mean lora_rank?" in shown


def test_train_hands_the_settings_to_the_api(run_file, trained):
    call("train", run_file, "steps=3", "lora_rank=8")
    assert trained.configs == [read_config(run_file, ["steps=3", "lora_rank=8"])]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("no rows"), 2),
        (StreamError("wrong block"), 1),
        (PorosOOMError("too large", needed=2, free=1), 2),
    ],
)
def test_an_error_of_poros_is_a_message_and_its_exit_code(run_file, trained, error, code):
    def train(config):
        raise error

    trained.train = train
    result = call("train", run_file, code=code)
    assert result.stderr == f"error: {error}\n"


def test_interrupt_exits_with_130(run_file, trained):
    def train(config):
        raise KeyboardInterrupt

    trained.train = train
    call("train", run_file, code=130)


def test_a_bug_keeps_its_traceback(run_file, trained):
    def train(config):
        raise ZeroDivisionError

    trained.train = train
    assert isinstance(call("train", run_file, code=1).exception, ZeroDivisionError)


def test_train_names_what_is_missing(run_file, trained, monkeypatch):
    monkeypatch.setattr("poros.hardware.missing_packages", lambda: ["torch", "trl"])
    result = call("train", run_file, code=2)
    assert "torch, trl" in result.stderr and 'pip install "poros-train[ml]"' in result.stderr
    assert trained.configs == []


def test_doctor():
    shown = call("doctor").stdout
    for name in ("processor", "GPU", "driver", "host memory", "page-lock limit", "disk free"):
        assert f"\n{name}" in shown
    machine = json.loads(call("doctor", "--json").stdout)
    assert machine["memory"]["total_bytes"] > 0
    assert machine["packages"]["torch"]
    assert isinstance(machine["notes"], list)


def test_everything_but_training_works_without_the_ml_packages(run_file, tmp_path):
    blocked = "torch transformers datasets peft trl bitsandbytes accelerate safetensors pyarrow"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {blocked.split()}:\n    sys.modules[name] = None\n"
    )

    def poros_command(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-c", "from poros.cli import main; main()", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    poros_command("--help")
    poros_command("init", tmp_path / "new.yaml", "-m", "m", "-d", "d")
    assert "3 text rows" in poros_command("check", run_file)
    assert "predicted peak" in poros_command("plan", "-m", "qwen2.5-7b", "--vram", "8GB")
    assert "cannot train without torch, transformers" in poros_command("doctor")
    shown = poros_command("train", run_file, code=2)
    assert "training needs torch, transformers, peft, trl, bitsandbytes, datasets" in shown


def test_importing_poros_does_not_import_torch():
    code = "import sys, poros, poros.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
