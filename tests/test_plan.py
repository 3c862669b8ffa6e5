"""The plan: exact counts, estimates against what autograd saves, advice that fits when taken."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poros import plan, shapes
from poros.errors import ConfigError, ModelError, PorosOOMError
from poros.plan import changes_that_fit, fit_table, make_plan
from poros.shapes import (
    KNOWN_MODELS,
    BlockShape,
    Matrix,
    ModelShape,
    read_model_shape,
    shape_from_tensors,
)

GB = 10**9
TINY = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test sees the machine's own cache or network."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(shapes, "_hub_resolves", lambda: False)
    return cache


def qwen7b() -> ModelShape:
    return read_model_shape("qwen2.5-7b")


def write_model(folder: Path, config: dict[str, Any], files: dict[str, dict[str, Any]]) -> Path:
    """A model folder with real safetensors files; shapes as given, zeros for weights."""
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file, tensors in files.items():
        save_file({k: numpy.zeros(v, numpy.float16) for k, v in tensors.items()}, folder / file)
    if files and "model.safetensors" not in files:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --- shapes


def test_counts_of_qwen_7b_by_hand() -> None:
    shape = qwen7b()
    matrices = 2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584
    others = 2 * 3584 + 3584 + 512 + 512  # two norms; biases of q, k and v
    assert shape.num_blocks == 28
    assert shape.blocks[0].num_params == matrices + others == 233_057_792
    assert shape.embedding_params == shape.head_params == 152064 * 3584
    # https://huggingface.co/Qwen/Qwen2.5-7B: 7.61B parameters
    assert shape.num_params == 28 * 233_057_792 + 2 * 152064 * 3584 + 3584 == 7_615_616_512
    assert [(m.name, m.out_features, m.in_features) for m in shape.blocks[0].matrices] == [
        ("mlp.down_proj", 3584, 18944),
        ("mlp.gate_proj", 18944, 3584),
        ("mlp.up_proj", 18944, 3584),
        ("self_attn.k_proj", 512, 3584),
        ("self_attn.o_proj", 3584, 3584),
        ("self_attn.q_proj", 3584, 3584),
        ("self_attn.v_proj", 512, 3584),
    ]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-32b", 32.76), ("qwen2.5-72b", 72.71), ("llama-3.1-8b", 8.03)],
)
def test_published_shapes_have_the_published_size(name: str, billions: float) -> None:
    assert read_model_shape(name).num_params / 1e9 == pytest.approx(billions, abs=0.005)


def test_tied_embeddings_count_once() -> None:
    shape = read_model_shape("smollm2-135m")
    assert shape.tied and shape.head_params == 0
    assert shape.num_params == 134_515_008


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen2.5-7B", "qwen2.5-7b", "QWEN2.5-7B", "Qwen/Qwen2.5-7B-Instruct"],
)
def test_known_names_need_no_file(name: str) -> None:
    assert replace(read_model_shape(name), name="") == replace(qwen7b(), name="")


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {},
    "smollm3": {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16, "pad_token_id": 0},
    "gemma2": {"head_dim": 16, "pad_token_id": 0},
    "gemma3_text": {"head_dim": 16, "pad_token_id": 0},
    "phi3": {"pad_token_id": 0},
    "gpt2": {},
    "gpt_neox": {},
}


def family_config(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in TINY.items() if k not in ("model_type", "tie_word_embeddings")}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    if family == "gpt_neox":
        del sizes["num_key_value_heads"]
    return transformers.AutoConfig.for_model(family, **(sizes | FAMILIES[family]))


def build(config: Any, device: str = "meta") -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_alone_gives_every_tensor_of_the_family(family: str, tmp_path: Path) -> None:
    config = family_config(family)
    model = build(config)
    real = {name: tuple(p.shape) for name, p in model.named_parameters()}
    config.save_pretrained(tmp_path)
    shape = read_model_shape(str(tmp_path))
    assert shape.source == "config.json"
    assert shape.num_params == model.num_parameters()
    assert len(real) > 10
    from_model = shape_from_tensors(shape.name, config.to_dict(), real, "config.json")
    assert shape == from_model


def test_every_known_family_is_tested() -> None:
    assert set(FAMILIES) == set(shapes._FAMILIES)


def test_headers_of_shards_are_read_and_preferred(tmp_path: Path) -> None:
    tensors = shapes._tensors_of_config(dict(TINY), "tiny")
    tensors["lm_head.weight"] = (128, 64)
    # One block differs: a checkpoint may prune or widen a layer, the config does not say so.
    tensors["model.layers.1.mlp.up_proj.weight"] = (192, 64)
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": {n: tensors[n] for n in names[::2]},
        "model-00002-of-00002.safetensors": {n: tensors[n] for n in names[1::2]},
    }
    shape = read_model_shape(str(write_model(tmp_path / "m", TINY, halves)))
    assert shape.source == "safetensors headers"
    assert shape.block_prefix == "model.layers"
    assert len(shape.kinds) == 2
    assert Matrix("mlp.up_proj", 192, 64) in shape.blocks[1].matrices
    assert plan.slot_bytes(shape, "bf16") == plan.packed_block_bytes(shape.blocks[1], "bf16")
    total = sum(plan.packed_block_bytes(b, "bf16") for b in shape.blocks)
    assert plan.store_bytes(shape, "bf16") == total

    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 2 .* model-00002-of-00002"):
        read_model_shape(str(tmp_path / "m"))


def test_a_single_file_and_its_config_give_the_same_shape(tmp_path: Path) -> None:
    tensors = shapes._tensors_of_config(dict(TINY), "tiny") | {"lm_head.weight": (128, 64)}
    files = {"model.safetensors": tensors}
    whole = read_model_shape(str(write_model(tmp_path / "a" / "m", TINY, files)))
    alone = read_model_shape(str(write_model(tmp_path / "b" / "m", TINY, {})))
    assert whole.source == "safetensors headers"
    assert replace(whole, source="") == replace(alone, source="")


def test_a_cut_checkpoint_file_is_refused(tmp_path: Path) -> None:
    tensors = shapes._tensors_of_config(dict(TINY), "tiny")
    folder = write_model(tmp_path / "m", TINY, {"model.safetensors": tensors})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", b"short", whole[:100], whole[:-1], b"\xff" * 64):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="no whole safetensors file"):
            read_model_shape(str(folder))


def test_a_missing_block_is_named(tmp_path: Path) -> None:
    tensors = shapes._tensors_of_config(dict(TINY), "tiny")
    tensors = {k: v for k, v in tensors.items() if ".layers.1." not in k}
    folder = write_model(tmp_path / "m", TINY, {"model.safetensors": tensors})
    with pytest.raises(ModelError, match=r"says 3 blocks, but block 1 \(model\.layers\.1\)"):
        read_model_shape(str(folder))


def test_experts_count_in_full_precision_and_need_the_checkpoint(tmp_path: Path) -> None:
    config = TINY | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    with pytest.raises(ModelError, match="mixture of 4 experts"):
        read_model_shape(str(write_model(tmp_path / "alone", config, {})))
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128, 64)}
    for i in range(3):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.self_attn.q_proj.weight"] = (64, 64)
        tensors[f"{layer}.mlp.gate.weight"] = (4, 64)
        for expert in range(4):
            tensors[f"{layer}.mlp.experts.{expert}.up_proj.weight"] = (32, 64)
    split = read_model_shape(
        str(write_model(tmp_path / "split", config, {"model.safetensors": tensors}))
    )
    block = split.blocks[0]
    assert [m.name for m in block.matrices] == ["self_attn.q_proj"]
    assert block.expert_params == 4 * 32 * 64
    assert split.active_expert_share == 0.5
    packed = plan.packed_block_bytes(block, "nf4")
    assert packed == (2048 + 256 + 256 + 256) + 512 + 4 * 4096  # q_proj, router, four experts
    assert any("fused experts" in note for note in make_plan(split).notes)


def test_a_quantised_checkpoint_is_sized_by_its_config(tmp_path: Path) -> None:
    config = TINY | {"quantization_config": {"quant_method": "bitsandbytes"}}
    packed = {"model.layers.0.mlp.up_proj.weight": (5120, 1)}
    folder = write_model(tmp_path / "m", config, {"model.safetensors": packed})
    assert read_model_shape(str(folder)).source == "config.json"


def test_the_hub_cache_comes_before_the_published_shapes(empty_cache: Path) -> None:
    repository = empty_cache / "models--Qwen--Qwen2.5-7B"
    write_model(repository / "snapshots" / "abc", TINY, {})
    assert read_model_shape("Qwen/Qwen2.5-7B", revision="abc").num_blocks == 3
    assert read_model_shape("Qwen/Qwen2.5-7B").num_blocks == 28
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert read_model_shape("Qwen/Qwen2.5-7B").num_blocks == 3


def test_a_nested_text_config_is_used(tmp_path: Path) -> None:
    text = {k: v for k, v in TINY.items() if k != "tie_word_embeddings"}
    config = {"model_type": "some_vlm", "tie_word_embeddings": False, "text_config": text}
    nested = read_model_shape(str(write_model(tmp_path / "a" / "m", config, {})))
    assert nested == read_model_shape(str(write_model(tmp_path / "b" / "m", TINY, {})))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TINY | {"model_type": "nosuch"}, "'nosuch' cannot be told from config.json alone"),
        (TINY | {"hidden_size": "wide"}, "hidden_size is 'wide'"),
        (TINY | {"intermediate_size": 0}, "intermediate_size is 0"),
        ({"model_type": "nosuch"}, "gives no num_hidden_layers, hidden_size"),
    ],
)
def test_bad_configs_are_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_shape(str(write_model(tmp_path / "m", config, {})))


def test_bad_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder at"):
        read_model_shape(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"no config[.]json: give a model folder"):
        read_model_shape(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="give the base model"):
        read_model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_model_shape(str(tmp_path))
    with pytest.raises(ModelError, match=r"org/unknown: no such folder.*qwen2\.5-7b"):
        read_model_shape("org/unknown")


def test_only_the_config_is_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = write_model(tmp_path / "m", TINY, {})
    asked = []

    def fetch(model: str, file: str, *, revision: str | None) -> str:
        asked.append((model, file, revision))
        if model == "org/gone":
            raise hub.errors.LocalEntryNotFoundError("connection lost")
        return str(folder / file)

    monkeypatch.setattr(shapes, "_hub_resolves", lambda: True)
    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert read_model_shape("org/tiny", revision="v1").num_blocks == 3
    with pytest.raises(ModelError, match=r"org/gone: .*not fetched .*connection lost"):
        read_model_shape("org/gone")
    assert asked == [("org/tiny", "config.json", "v1"), ("org/gone", "config.json", None)]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing to stream"):
        shape_from_tensors("flat", TINY, {"embed.weight": (128, 64)}, "test")


# --- bytes


def test_packed_bytes_by_hand() -> None:
    block = BlockShape((Matrix("m", 300, 100),), (("norm.weight", 100),))
    # 30000 weights: 15000 bytes, 469 absmax, 2 nested absmax, one offset; each padded to 256.
    assert list(plan.matrix_bytes(30000, 300, "nf4")) == [15000, 469, 8, 4]
    assert plan.packed_block_bytes(block, "nf4") == 15104 + 512 + 256 + 256 + 256
    assert plan.packed_block_bytes(block, "bf16") == 60160 + 256
    assert plan.packed_block_bytes(block, "int8") == 30208 + 1280 + 256
    assert plan.packed_block_bytes(block, "nf4", compute_bytes=4) == 15104 + 512 + 256 + 256 + 512


def test_sizes_of_qwen_7b_as_measured() -> None:
    shape = qwen7b()
    assert plan.slot_bytes(shape, "nf4") / 1e6 == pytest.approx(120, rel=0.005)
    assert plan.store_bytes(shape, "nf4") / 1e9 == pytest.approx(3.37, rel=0.002)
    matrices = sum(m.numel for m in shape.blocks[0].matrices)
    assert plan.slot_bytes(shape, "nf4") / matrices == pytest.approx(0.516, abs=0.001)


@pytest.mark.parametrize(
    ("name", "tokens", "measured_gib"),
    [
        ("qwen2.5-7b", 512, 0.32),
        ("qwen2.5-7b", 2048, 0.86),
        ("qwen2.5-32b", 512, 0.54),
        ("qwen2.5-32b", 2048, 1.30),
        ("qwen2.5-72b", 512, 0.81),
        ("qwen2.5-72b", 2048, 1.82),
    ],
)
def test_visit_of_a_block_as_measured(name: str, tokens: int, measured_gib: float) -> None:
    """One H200, nf4, LoRA rank 16 on all seven matrices in float32, no autocast."""
    shape = read_model_shape(name)
    visit = plan.saved_bytes(shape, tokens, "all-linear") + plan.flight_bytes(shape, tokens)
    total = visit + plan.workspace_bytes(shape, "nf4")
    assert total / 2**30 == pytest.approx(measured_gib, abs=0.025)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("quantization", ["bf16", "nf4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma2", "gpt2", "gpt_neox"])
def test_saved_and_packed_bytes_against_the_real_block(
    family: str, quantization: plan.Quantization, autocast: bool, tmp_path: Path
) -> None:
    """What autograd saves in one real layer, and what bitsandbytes stores of it."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config, tokens, rank = family_config(family), 96, 4
    if family == "gpt2":
        config.n_positions = config.n_embd = 128
    build(config, "cpu").save_pretrained(tmp_path)
    options = {}
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, **options
    )
    shape = read_model_shape(str(tmp_path))
    assert shape.source == "safetensors headers"
    stack = model.base_model
    layer = (stack.layers if hasattr(stack, "layers") else stack.h)[0]

    stored = 0
    for parameter in layer.parameters():
        parts = [parameter]
        if state := getattr(parameter, "quant_state", None):
            parts += [state.absmax, state.state2.absmax, state.offset]
        stored += sum(-(-t.nbytes // plan.ALIGN) * plan.ALIGN for t in parts)
    assert plan.packed_block_bytes(shape.blocks[0], quantization) == stored > 0

    lora = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, lora)
    own = {p.untyped_storage().data_ptr() for p in tuned.parameters()}
    saved: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def pack(tensor: Any) -> Any:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tokens in tensor.shape:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    forward = layer.forward

    def watched(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(hidden.detach().requires_grad_(), *args, **kwargs)

    layer.forward = watched
    tuned.train()
    for module in tuned.modules():  # dropout masks are not part of the estimate
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tuned(input_ids=torch.arange(tokens)[None] % 100, use_cache=False)
    assert saved
    predicted = plan.saved_bytes(
        shape,
        tokens,
        "all-linear",
        rank=rank,
        seq_len=tokens,
        quantization=quantization,
        device="cpu",
        autocast=autocast,
    )
    assert predicted == pytest.approx(sum(saved.values()), rel=0.08)


def test_adapters_by_hand() -> None:
    shape = qwen7b()
    assert plan.lora_params(shape, 16, "all-linear") == 28 * 16 * (
        2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    )
    two = 28 * 8 * ((3584 + 3584) + (3584 + 512))
    for targets in (["q_proj", "v_proj"], r".*\.(q|v)_proj", ("self_attn.q_proj", "v_proj")):
        assert plan.lora_params(shape, 8, targets) == two
    assert plan.lora_params(shape, 8, "q_proj") == 28 * 8 * 7168
    assert plan.lora_params(shape, 8, r"model\.layers\.[0-3]\..*q_proj") == 4 * 8 * 7168


@pytest.mark.parametrize("targets", ["qproj", ["q_prj"], [], r".*\.nothing"])
def test_targets_that_match_nothing(targets: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"matches no matrix.*down_proj"):
        plan.lora_params(qwen7b(), 16, targets)


def test_a_misspelt_target_is_corrected_and_a_bad_expression_named() -> None:
    with pytest.raises(ConfigError, match="did you mean q_proj"):
        make_plan(qwen7b(), target_modules=["q_prj"])
    with pytest.raises(ConfigError, match="is no expression"):
        make_plan(qwen7b(), target_modules="*_proj(")


@pytest.mark.parametrize(
    ("optimizer", "per_element"),
    [
        ("adamw_torch", 8),
        ("adamw_torch_fused", 8),
        ("paged_adamw_32bit", 8),
        ("adamw_8bit", 2.03125),
        ("paged_adamw_8bit", 2.03125),
        ("lion_32bit", 4),
        ("sgd", 0),
    ],
)
def test_optimizer_state(optimizer: str, per_element: float) -> None:
    assert plan.optimizer_state_bytes(optimizer, 10**6) == round(per_element * 10**6)


def test_an_unknown_optimizer_is_said() -> None:
    assert plan.optimizer_state_bytes("lomo", 10) is None
    unknown, known = make_plan(qwen7b(), optimizer="lomo"), make_plan(qwen7b())
    assert unknown.terms["optimizer state"] == known.terms["optimizer state"]
    assert "lomo is not known here" in unknown.notes[0] and known.notes == ()


# --- plans


def test_the_peak_is_the_sum_of_named_terms() -> None:
    found = make_plan(qwen7b(), block_size=2, seq_len=512)
    assert found.phase == "backward of a block"
    assert found.peak_bytes == sum(found.terms.values())
    assert found.peak_bytes == max(sum(terms.values()) for terms in found.phases.values())
    assert found.terms["slots"] == 2 * plan.slot_bytes(qwen7b(), "nf4")
    assert found.terms["embeddings and head"] == 2 * (2 * 152064 * 3584 + 3584)
    assert found.terms["adapters"] == 4 * found.trainable_params
    assert found.phases["loss"]["boundaries"] == 28 * 512 * 3584 * 2
    assert found.phases["loss"]["head and loss tile (estimate)"] == 512 * 32768 * 2
    assert found.driver_bytes > found.peak_bytes
    assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] == found.peak_bytes
    text = "\n".join(found.lines())
    assert all(name in text for name in found.terms)
    assert "2 as asked" in text and "a step copies 52 blocks" in text


def test_a_vocabulary_heavy_model_peaks_in_the_loss() -> None:
    found = make_plan(read_model_shape("smollm2-135m"), batch_size=8, micro_rows=1)
    assert found.phase == "loss"


def test_earlier_gradients_are_counted_when_steps_accumulate() -> None:
    one, four = (make_plan(qwen7b(), gradient_accumulation_steps=n) for n in (1, 4))
    assert one.phases["loss"]["gradients"] == 0
    assert four.phases["loss"]["gradients"] == 4 * four.trainable_params
    assert four.loads_per_step == 4 * one.loads_per_step


def test_slots_are_reported_with_their_reason() -> None:
    shape = read_model_shape("smollm2-135m")
    assert make_plan(shape, block_size=4).slots_reason == "4 as asked"
    clamped = make_plan(shape, block_size=99)
    assert clamped.num_slots == 30 and clamped.loads_per_step == 0
    assert clamped.slots_reason == "clamped from 99 to 30: the model has 30 blocks"
    filled = make_plan(qwen7b(), vram_bytes=5 * GB)
    assert filled.slots_reason == f"auto: {filled.num_slots} slots fill what is left of 4.66 GiB"
    assert 1 < filled.num_slots < 28
    assert make_plan(qwen7b(), vram_bytes=24 * GB).slots_reason.startswith("auto: all 28 blocks")
    assert make_plan(qwen7b()).num_slots == plan.UNASKED_SLOTS
    cpu = make_plan(qwen7b(), device="cpu", vram_bytes=100 * GB)
    assert cpu.num_slots == plan.CPU_SLOTS and cpu.driver_terms == {}
    with pytest.raises(ConfigError, match="block_size is 0"):
        make_plan(shape, block_size=0)


def test_auto_fills_to_the_last_slot() -> None:
    for limit in (5 * GB, 6 * GB):
        found = make_plan(qwen7b(), vram_bytes=limit)
        assert found.fits
        with pytest.raises(PorosOOMError):
            make_plan(qwen7b(), vram_bytes=limit, block_size=found.num_slots + 1)


def test_int8_keeps_every_block() -> None:
    found = make_plan(qwen7b(), quantization="int8", block_size=4)
    assert found.num_slots == 28 and found.loads_per_step == 0
    assert "does not stream" in found.slots_reason
    assert "packed base" not in found.host_terms


def test_step_time_is_known_only_when_measured() -> None:
    shape = qwen7b()
    assert make_plan(shape, block_size=2).step_seconds is None
    assert make_plan(shape, block_size=2, flops=1e14).step_seconds is None
    assert "unknown (link speed" in "\n".join(make_plan(shape, block_size=2, flops=1e14).lines())
    slow = make_plan(shape, block_size=2, flops=1e14, link_gb_per_s=10)
    assert slow.transfer_seconds == pytest.approx(52 * plan.slot_bytes(shape, "nf4") / 10e9)
    assert slow.step_seconds == slow.transfer_seconds
    # Three passes over the weights at least.
    assert plan.step_flops(shape, 512, 512, 16, "all-linear") > 6 * 512 * 7.0e9
    resident = make_plan(shape, block_size=28, flops=1e14)
    assert resident.step_seconds == resident.compute_seconds is not None


slots = st.integers(1, 28)
lengths = st.integers(1, 16384)
ranks = st.integers(1, 256)
rows = st.integers(1, 16)


@given(slots, slots, lengths, rows)
def test_more_slots_cost_memory_and_save_loads(a: int, b: int, length: int, batch: int) -> None:
    fewer, more = (
        make_plan(qwen7b(), block_size=s, seq_len=length, batch_size=batch) for s in sorted((a, b))
    )
    step = more.num_slots - fewer.num_slots
    assert more.peak_bytes - fewer.peak_bytes == step * more.slot_bytes
    assert fewer.loads_per_step - more.loads_per_step == 2 * step
    assert fewer.phase == more.phase


@given(lengths, lengths, rows, ranks, st.sampled_from(["cuda", "cpu"]))
def test_longer_rows_cost_memory(a: int, b: int, batch: int, rank: int, device: Any) -> None:
    short, long = (
        make_plan(qwen7b(), seq_len=s, batch_size=batch, lora_rank=rank, device=device)
        for s in sorted((a, b))
    )
    assert short.peak_bytes <= long.peak_bytes
    if a != b:
        boundaries = [p.phases["loss"]["boundaries"] for p in (short, long)]
        assert boundaries[0] < boundaries[1]


@given(ranks, ranks, rows, rows)
def test_rank_and_micro_rows_cost_memory(a: int, b: int, micro: int, batch: int) -> None:
    low, high = (make_plan(qwen7b(), lora_rank=r) for r in sorted((a, b)))
    assert low.peak_bytes <= high.peak_bytes
    whole = make_plan(qwen7b(), batch_size=batch)
    part = make_plan(qwen7b(), batch_size=batch, micro_rows=micro)
    assert part.peak_bytes <= whole.peak_bytes
    assert part.loads_per_step == whole.loads_per_step


# --- what to change


TIGHT = [
    ("qwen2.5-7b", 5 * GB, {"block_size": 16}),
    ("qwen2.5-7b", 6 * GB, {"batch_size": 8, "seq_len": 2048, "block_size": 4}),
    ("qwen2.5-7b", 6 * GB, {"quantization": "int8"}),
    ("qwen2.5-7b", 8 * GB, {"quantization": "int8", "batch_size": 16, "seq_len": 1024}),
    ("qwen2.5-7b", 6 * GB, {"lora_rank": 256}),
    ("qwen2.5-72b", 24 * GB, {"block_size": 80, "seq_len": 4096}),
    ("llama-3.1-8b", 5 * GB, {"seq_len": 8192}),
    ("llama-3.1-8b", 12 * GB, {"quantization": "bf16", "block_size": 20, "seq_len": 16384}),
    ("qwen2.5-32b", 7 * GB, {"quantization": "bf16", "seq_len": 2048}),
]


@pytest.mark.parametrize(("name", "vram", "options"), TIGHT)
def test_the_advice_fits_when_it_is_taken(name: str, vram: int, options: dict[str, Any]) -> None:
    shape = read_model_shape(name)
    with pytest.raises(PorosOOMError) as caught:
        make_plan(shape, vram_bytes=vram, **options)
    error = caught.value
    assert error.needed is not None and error.needed > vram == error.free
    assert sum(error.terms.values()) == error.needed
    changes, promised = changes_that_fit(plan._plan(shape, plan.Job(vram_bytes=vram, **options)))
    assert changes
    taken = make_plan(shape, **{**options, **changes, "vram_bytes": vram})
    assert taken.driver_bytes == promised.driver_bytes <= vram
    for key, value in changes.items():
        assert f"{'max_seq_length' if key == 'seq_len' else key}: {value}" in error.advice
        # Every single change is needed.
        rest = {k: v for k, v in changes.items() if k != key}
        if key != "gradient_accumulation_steps":
            with pytest.raises(PorosOOMError):
                make_plan(shape, **{**options, **rest, "vram_bytes": vram})
    batch = taken.job.batch_size * taken.job.gradient_accumulation_steps
    assert batch == options.get("batch_size", 1)  # the step trains on as many rows


def test_block_size_is_the_first_to_go() -> None:
    with pytest.raises(PorosOOMError, match=r"next: set block_size: 8 \(needs"):
        make_plan(qwen7b(), vram_bytes=5 * GB, block_size=16)


def test_what_cannot_fit_says_so() -> None:
    with pytest.raises(PorosOOMError, match=r"even with .* it needs .* choose a smaller model"):
        make_plan(read_model_shape("qwen2.5-72b"), vram_bytes=2 * GB, block_size=4)


def test_fit_table() -> None:
    table = fit_table(read_model_shape("qwen2.5-32b"), seq_len=512)
    assert [row.vram_gb for row in table] == [4, 6, 8, 12, 16, 24, 32]
    found = [row.plan.num_slots if row.plan else None for row in table]
    assert found[0] is None and found[-1] == 64
    counts = [n or 0 for n in found]
    assert counts == sorted(counts)
    for row in table:
        if row.plan is not None:
            assert row.plan.driver_bytes <= row.vram_gb * GB
    assert [r.plan for r in fit_table(qwen7b(), vram_gb=[1])] == [None]


# --- without torch


def test_plans_are_made_without_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numpy', 'safetensors', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "from poros.plan import fit_table, make_plan\n"
        "from poros.shapes import read_model_shape\n"
        "shape = read_model_shape('Qwen/Qwen2.5-32B')\n"
        "print(len(make_plan(shape).lines()), len(fit_table(shape)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "7"


def test_known_models_are_those_of_the_documentation() -> None:
    assert set(KNOWN_MODELS) == {
        "qwen2.5-7b",
        "qwen2.5-32b",
        "qwen2.5-72b",
        "llama-3.1-8b",
        "smollm2-135m",
    }
