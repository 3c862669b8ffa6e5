"""The run file: what is read, and the one error that names every fault."""

import pytest
import yaml

from poros.config import RunConfig, make_config, read_config, write_config
from poros.errors import ConfigError, OutputError

MINIMAL = "model: m\ndata: d.jsonl\n"


@pytest.fixture
def read(tmp_path):
    def read(text: str | bytes, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_config(path, overrides)

    return read


def faults(call, *args) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value).splitlines()


def test_defaults_and_overrides(read):
    config = read(
        MINIMAL + "steps: 4\nlearning_rate: 2e-4\n",
        "steps=7",
        "seq_len=64",
        "epochs=2",
        "target_modules=[q_proj, v_proj]",
        "prompt=Why: because #1",
        "eval_data=null",
        'revision="12"',
    )
    assert config.steps == 7
    assert config.learning_rate == 2e-4
    assert config.max_seq_length == 64
    assert config.epochs == 2.0
    assert config.target_modules == ["q_proj", "v_proj"]
    assert config.prompt == "Why: because #1"
    assert config.revision == "12"
    assert config.quantization == "nf4" and config.block_size == "auto"


def test_an_override_replaces_the_other_name_of_its_setting(read):
    assert read(MINIMAL + "max_seq_length: 512\n", "seq_len=64").max_seq_length == 64
    assert read(MINIMAL + "seq_len: 512\n", "max_seq_length=64").max_seq_length == 64


def test_older_precision_name(read):
    assert read(MINIMAL + "quantization: bf16_bitwise\n").quantization == "bf16"


def test_home_is_expanded(read, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    config = read("model: ~/m\ndata: ~/d.jsonl\neval_data: ~/e.jsonl\noutput: ~/out\n")
    assert config.model == "/somewhere/m"
    assert config.data == "/somewhere/d.jsonl"
    assert config.eval_data == "/somewhere/e.jsonl"
    assert config.output == "/somewhere/out"


def test_all_faults_at_once(read):
    text = """\
model: 5
lora_rnk: 3
steps: "40"
lr: 2
learning_rate: 2e-4
learning_rate: 1e-4
block_size: 0
eval_steps: 3
vram: 12 parsecs
target_modules: [1, q]
quantization: nf5
seq_len: 4
max_seq_length: 5
weight_decay: .inf
optimizer: null
"""
    heading, *lines = faults(read, text, "steps", "epochs=true", "trust_remote_code='")
    assert heading.endswith("run.yaml cannot be used:")
    wanted = [
        "learning_rate: given twice, in line 5 and line 6",
        "seq_len and max_seq_length are one setting",
        "override 'steps': wanted key=value",
        'override "trust_remote_code=\'": not a YAML value',
        "model: found 5 (a whole number), wanted a valid string",
        "data: missing; wanted the hub dataset id",
        "quantization: found 'nf5' (text), wanted 'nf4', 'bf16' or 'int8'",
        "block_size: found 0 (a whole number), must be 1 or more, or auto",
        "vram: found '12 parsecs' (text), '12 parsecs' is not a size",
        "target_modules: found [1, 'q'] (a list), wanted a valid string",
        "steps: found '40' (text), wanted a valid integer",
        "epochs: found true (a truth value), wanted a valid number",
        "optimizer: found null (nothing), wanted a valid string",
        "weight_decay: found inf (a number), wanted a finite number",
        "eval_steps: found 3 (a whole number), there is nothing to evaluate",
        "lora_rnk: unknown key; did you mean lora_rank?",
        "lr: unknown key",
        "known keys: model, ",
    ]
    assert len(lines) == len(wanted)
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith("  " + start)


def test_an_unknown_key_in_an_override_names_the_nearest(read):
    assert "  batchsize: unknown key; did you mean batch_size?" in faults(
        read, MINIMAL, "batchsize=2"
    )


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_every_misspelt_key_finds_itself(name):
    assert f"  {name}s_: unknown key; did you mean {name}?" in faults(
        make_config, {"model": "m", "data": "d", f"{name}s_": 1}
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- model\n", "found a list, wanted `key: value` lines"),
        ("model", "found text, wanted `key: value` lines"),
        ("model: m\ndata: [d\n", "not valid YAML: line 3, column 1: "),
        ("model: m\n\tdata: d\n", "not valid YAML: line 2, column 1: "),
        ("model: a: b\n", "not valid YAML: line 1, column 9: "),
        ("? [model]\n: m\n", "not valid YAML: line 1, column 3: found unhashable key"),
        ("model: !!python/name:os.system m\n", "not valid YAML: line 1, column 8: "),
        ("model: 2020-13-45\n", "not valid YAML: month must be in 1..12"),
        ("[" * 5000, "not valid YAML: "),
        (b"model: \xff\n", "not a UTF-8 text file (byte 7)"),
    ],
)
def test_unreadable_files(read, text, reason):
    (line,) = faults(read, text)
    assert f"run.yaml: {reason}" in line


def test_missing_file_and_folder(tmp_path):
    (line,) = faults(read_config, tmp_path / "absent.yaml")
    assert "no such file" in line and "poros init" in line
    (line,) = faults(read_config, tmp_path)
    assert "cannot be read" in line


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_no_such_learning_rate(read, value):
    (_, line) = faults(read, MINIMAL, f"learning_rate={value}")
    assert line.startswith("  learning_rate: found ")


def test_written_config_shows_every_setting_and_reads_back(tmp_path):
    path = tmp_path / "new.yaml"
    write_config(path, model="org/m", data="odd: name #1.jsonl", seq_len=64)
    text = path.read_text()
    assert list(yaml.safe_load(text)) == list(RunConfig.model_fields)
    assert read_config(path) == make_config(
        {"model": "org/m", "data": "odd: name #1.jsonl", "seq_len": 64}
    )
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        assert f"# {field.description}" in text
    assert "(nf4 | bf16 | int8)" in text


def test_a_config_is_never_overwritten(tmp_path):
    path = tmp_path / "new.yaml"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_config(path, model="m", data="d")
    assert path.read_text() == "mine"
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        write_config(tmp_path / "no" / "folder.yaml", model="m", data="d")
    with pytest.raises(ConfigError, match="modl: unknown key"):
        write_config(tmp_path / "bad.yaml", modl="m")
    assert not (tmp_path / "bad.yaml").exists()
