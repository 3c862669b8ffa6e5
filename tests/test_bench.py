import importlib.util
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from poros import bench, validation
from poros.cli import app
from poros.core import boundary
from poros.errors import ConfigError, PorosOOMError
from poros.loader import nf4_config

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
BLOCKS = 3
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
TIED = {**TINY, "model_type": "llama", "tie_word_embeddings": True}


def tensors(model):
    """Every tensor by name: quantisation state and non-persistent buffers included."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same(left, right):
    left, right = tensors(left), tensors(right)
    assert left.keys() == right.keys()
    assert len(left) > 30
    different = [
        name
        for name in left
        if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]
    assert different == []


@pytest.mark.parametrize("shape", [TINY, TIED], ids=["qwen2", "tied llama"])
@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_a_random_model_is_what_from_pretrained_makes_of_its_checkpoint(
    tmp_path, shape, quantization
):
    made = bench.random_model(shape, quantization=quantization, device=CPU, host=False, seed=3)
    bench.random_model(shape, quantization="bf16", device=CPU, host=False, seed=3).save_pretrained(
        tmp_path
    )
    kwargs = {"quantization_config": nf4_config()} if quantization == "nf4" else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **kwargs)
    assert_same(made, loaded)
    assert [type(m) for m in made.modules()] == [type(m) for m in loaded.modules()]
    for mark in ("is_loaded_in_4bit", "is_quantized", "quantization_method"):
        assert getattr(made, mark, None) == getattr(loaded, mark, None), mark
    ids = bench.random_ids("1x8", shape, CPU)
    with torch.no_grad():
        assert torch.equal(made(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_a_seed_makes_the_same_bytes_wherever_they_go(quantization):
    def make(host, seed=0):
        return bench.random_model(TINY, quantization=quantization, device=CPU, host=host, seed=seed)

    assert_same(make(True), make(False))
    with pytest.raises(AssertionError):
        assert_same(make(True), make(True, seed=1))


def test_known_shapes_and_their_blocks_are_taken_from_the_plan():
    found = bench.model_config("qwen2.5-72b", 2)
    assert (found["hidden_size"], found["num_hidden_layers"]) == (8192, 2)
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        bench.model_config("qwen-7b")
    with pytest.raises(ConfigError, match="int8"):
        bench.random_model(TINY, quantization="int8", device=CPU, host=True)


def test_adapters_that_ignore_the_quantised_layer_are_refused():
    model = bench.random_model(TINY, device=CPU, host=True)
    model.is_loaded_in_4bit = False
    # PEFT then takes its generic layer; the check must not follow the same mark.
    with pytest.raises(AssertionError, match="LoRA layers are"):
        bench.add_lora(model)


def test_programs_are_built_as_they_are_named():
    programs = {name: bench.build(name, TINY, num_slots=2, device=CPU) for name in bench.PROGRAMS}
    counts = {
        name: None if p.streaming is None else p.streaming.stream.num_slots
        for name, p in programs.items()
    }
    assert counts == {"streamed": 2, "resident": BLOCKS, "peft": None}
    layers = {name: p.model.get_base_model().model.layers for name, p in programs.items()}
    recompute = {
        name: [layer.gradient_checkpointing for layer in ls] for name, ls in layers.items()
    }
    # A streamed block recomputes in its own visit.
    assert recompute == {
        "streamed": [False] * BLOCKS,
        "resident": [False] * BLOCKS,
        "peft": [True] * BLOCKS,
    }
    assert all(program.model.training for program in programs.values())


@pytest.mark.parametrize("name", bench.PROGRAMS)
def test_a_deleted_program_gives_back_what_it_held(name):
    program = bench.build(name, TINY, num_slots=2, device=CPU)
    program.step(bench.random_ids("1x8", TINY, CPU))
    held = [weakref.ref(program.model.get_base_model())]
    if program.streaming is not None:
        held += [weakref.ref(program.streaming.store), weakref.ref(program.streaming.stream)]
    del program
    bench._free(CPU)
    assert [thing() for thing in held] == [None] * len(held)


def test_bench_measures_every_program_and_counts_its_loads_exactly(tmp_path):
    out = tmp_path / "bench.json"
    found = bench.bench(
        TINY,
        tokens=["1x8", "2x4"],
        slots=[1, 2],
        num_steps=2,
        num_warmup=1,
        device="cpu",
        out=out,
        log=lambda _: None,
    )
    assert validation.read(out) == found
    cells = {
        (r["case"]["tokens"], r["case"]["program"], r["case"].get("block_size"), r["metric"]): r[
            "value"
        ]
        for r in found["rows"]
    }
    assert len(cells) == len(found["rows"])
    programs = {("streamed", 1), ("streamed", 2), ("resident", BLOCKS), ("peft", None)}
    timed = {key[:3] for key in cells if key[3] == "step_ms"}
    assert timed == {(tokens, *program) for tokens in ("1x8", "2x4") for program in programs}
    for key, value in cells.items():
        if key[3] == "loads_per_step":
            assert value == 2 * (BLOCKS - key[2])
        else:
            assert value > 0, key
    for tokens in ("1x8", "2x4"):
        step = {program: cells[tokens, *program, "step_ms"] for program in programs}
        low, high = (cells[tokens, "peft", None, f"step_ms_{end}"] for end in ("min", "max"))
        assert low <= step["peft", None] <= high
        ratio = step["streamed", 2] / step["resident", BLOCKS]
        assert cells[tokens, "streamed", 2, "ratio_to_resident"] == pytest.approx(ratio)
        ratio = step["streamed", 1] / step["peft", None]
        assert cells[tokens, "streamed", 1, "ratio_to_peft"] == pytest.approx(ratio)
    # What only a GPU has is left out, not zero.
    assert {key[3] for key in cells} == {
        "step_ms",
        "step_ms_min",
        "step_ms_max",
        "loads_per_step",
        "ratio_to_resident",
        "ratio_to_peft",
    }
    assert found["machine"]["link_gb_per_s"] is None


def test_bench_stops_in_time():
    heard = []
    found = bench.bench(
        TINY, tokens=["1x8"], num_steps=2, device="cpu", limit_s=1e-9, log=heard.append
    )
    assert found["rows"] == []
    assert any("the time is up after 0 of 2" in line for line in heard)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tokens": ["512"]}, "8x512"),
        ({"tokens": ["0x512"]}, "8x512"),
        ({"slots": [0]}, "1 to 3"),
        ({"slots": [4]}, "1 to 3"),
        ({"programs": ["unsloth"]}, "unsloth"),
        ({"num_steps": 0}, "num_steps"),
        ({"quantization": "int8"}, "int8"),
    ],
)
def test_bench_names_what_it_cannot_measure(wrong, named):
    with pytest.raises(ConfigError, match=named):
        bench.bench(TINY, device="cpu", log=lambda _: None, **{"tokens": ["1x8"], **wrong})


def test_running_out_of_memory_is_an_error_of_its_own(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(bench, "build", full)
    with pytest.raises(PorosOOMError, match="tried to allocate 2 GiB"):
        bench.bench(TINY, tokens=["1x8"], device="cpu", log=lambda _: None)


# -- the parity script -----------------------------------------------------------------------------

PARITY = ["--shape", json.dumps(TINY), "--steps", "2", "--tokens", "2x8", "--device", "cpu"]


@pytest.fixture
def parity():
    """The script as a module; it turns deterministic mode on, which ends with the test."""
    spec = importlib.util.spec_from_file_location("parity", ROOT / "benchmarks" / "parity.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    spec.loader.exec_module(module)
    before = torch.are_deterministic_algorithms_enabled()
    yield module
    torch.use_deterministic_algorithms(before)
    del sys.modules["parity"]


def scores(path):
    """{(program, surface): {metric: value}} of a parity artifact."""
    found = {}
    for row in validation.read(path)["rows"]:
        key = row["case"]["program"], row["case"]["surface"]
        found.setdefault(key, {})[row["metric"]] = row["value"]
    return found


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_parity_of_a_streamed_run(tmp_path, quantization):
    out = tmp_path / "parity.json"
    extra = ["--quantization", quantization, "--dropout", "0.1", "--poison", "--self-check"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.parity", *PARITY, *extra, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    adapters = BLOCKS * 7 * 2
    counts = {
        "loss": 1,
        "logits": 1,
        "gradients": adapters,
        "gradient_norm": 1,
        "adapters": adapters,
        "optimizer": 3 * adapters,
        "random_state": 1,
    }
    assert scores(out) == {
        (program, surface): {
            "num_tensors_equal": 2 * count,
            "num_tensors": 2 * count,
            "max_abs_diff": 0,
        }
        for program in ("streamed", "peft")
        for surface, count in counts.items()
    }


def test_parity_sees_a_recomputation_with_other_dropout(tmp_path, monkeypatch, parity):
    replay = boundary.Boundary.replay

    def forgetful(self):
        self._random = boundary._random_state(self._device)
        return replay(self)

    monkeypatch.setattr(boundary.Boundary, "replay", forgetful)
    out = tmp_path / "parity.json"
    assert parity.main([*PARITY, "--dropout", "0.1", "--steps", "1", "--out", str(out)]) == 1
    found = scores(out)
    gradients = found["streamed", "gradients"]
    assert gradients["num_tensors_equal"] < gradients["num_tensors"]
    assert gradients["max_abs_diff"] > 0
    # The loss is that of the forward, which was right: only the gradients tell.
    assert found["streamed", "loss"]["num_tensors_equal"] == 1
    # Without dropout there is nothing to forget.
    assert parity.main([*PARITY, "--steps", "1"]) == 0


def test_parity_sees_one_flipped_bit_of_the_base(tmp_path, monkeypatch, parity):
    build = bench.build

    def flipped(name, *args, **kwargs):
        program = build(name, *args, **kwargs)
        if program.streaming is not None:
            program.streaming.store.buffers[1][100] ^= 1
        return program

    monkeypatch.setattr(bench, "build", flipped)
    assert parity.main([*PARITY, "--steps", "1"]) == 1


def test_parity_refuses_gradients_that_prove_nothing(monkeypatch, parity, capsys):
    add = bench.add_lora

    def untrained(*args, **kwargs):
        model = add(*args, **kwargs)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
        return model

    monkeypatch.setattr(bench, "add_lora", untrained)
    assert parity.main([*PARITY, "--steps", "1"]) == 1
    assert f"no gradient at {BLOCKS * 7} adapters" in capsys.readouterr().out


def test_parity_of_nothing_is_no_success(parity):
    assert parity.main([*PARITY, "--limit", "1e-9"]) == 1


# -- the command -----------------------------------------------------------------------------------

SMALL = ["--shape", json.dumps(TINY), "--tokens", "1x8", "--steps", "2", "--device", "cpu"]


def command(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_writes_what_it_measured_and_shows_a_table(tmp_path):
    out = tmp_path / "new" / "bench.json"
    more = ["--tokens", "2x4", "--slots", "1", "--slots", "2", "--json", out]
    shown = command(*SMALL, *more).stdout
    found = validation.read(out)
    cases = {
        (r["case"]["tokens"], r["case"]["program"], r["case"].get("block_size"))
        for r in found["rows"]
    }
    assert len(cases) == 2 * 4
    lines = shown.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(cases)
    assert [word.strip() for word in table[0].strip("|").split("|")] == [
        "tokens",
        "program",
        "block_size",
        "step_ms",
        "loads_per_step",
        "ratio_to_resident",
        "ratio_to_peft",
    ]
    # Progress came before: each program, each result.
    assert len([line for line in lines[: -len(table)] if line.startswith("built ")]) == 4
    assert len([line for line in lines if " step_ms " in line and line[0] != "|"]) == len(cases)


def test_the_command_runs_from_a_checkout(tmp_path):
    run = [sys.executable, "-m", "poros", "bench", *SMALL, "--program", "streamed", "--blocks", "2"]
    out = tmp_path / "bench.json"
    done = subprocess.run([*run, "--json", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = validation.read(out)
    assert found["command"].startswith("poros bench --shape ")
    assert {(r["case"]["program"], r["case"]["num_blocks"]) for r in found["rows"]} == {
        ("streamed", 2)
    }
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shape", "qwen"], "known: qwen2.5-7b"),
        (["--shape", '{"model_type"'], "not valid JSON"),
        (["--shape", '{"model_type": "qwen2"}'], "no num_hidden_layers, vocab_size"),
        (["--shape", json.dumps({**TINY, "model_type": "qwen99"})], "qwen99"),
        (["--shape", json.dumps({**TINY, "model_type": "t5"})], "t5"),
        (["--program", "unsloth"], "unsloth"),
        (["--json", "{folder}"], "wanted a file"),
        (["--json", "{folder}/file/bench.json"], "cannot be made"),
        (["--limit", "1e-9"], "raise --limit"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, named, tmp_path):
    (tmp_path / "file").touch()
    result = command(*SMALL, *(a.replace("{folder}", str(tmp_path)) for a in arguments), code=2)
    assert result.stderr.startswith("error: ") and named in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_names_what_is_missing(monkeypatch):
    monkeypatch.setattr("poros.hardware.missing_packages", lambda: ["torch"])
    assert "needs torch" in command(code=2).stderr
