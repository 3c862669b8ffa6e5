"""What the repository ships as examples is what the code accepts."""

import subprocess
import sys
from pathlib import Path

import pytest

from poros.config import read_config

ROOT = Path(__file__).parent.parent
HIDDEN = (".venv", ".git", ".github", "poros_output")


def run_files() -> list[Path]:
    found = [path for end in ("yaml", "yml") for path in ROOT.rglob(f"*.{end}")]
    return [path for path in found if path.relative_to(ROOT).parts[0] not in HIDDEN]


def test_every_yaml_of_the_repository_is_a_run():
    files = run_files()
    assert files
    for file in files:
        read_config(file)


@pytest.mark.slow
def test_the_demo_finds_its_model_and_data(tmp_path):
    pytest.importorskip("gguf")
    from transformers import AutoConfig, AutoTokenizer

    run = tmp_path / "run.yaml"
    run.write_text(f"model: {tmp_path}/model\ndata: {tmp_path}/rows.jsonl\n")
    command = [sys.executable, ROOT / "examples" / "prepare_quickstart.py", run]
    first = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "converting" in first.stdout
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 30
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 503
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "rows.jsonl", "run.yaml"]
    second = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "converting" not in second.stdout
