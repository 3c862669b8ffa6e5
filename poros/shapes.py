"""A model's shape without its weights: the matrices of every block, from a few kilobytes.

Shapes come from `config.json` and, where the checkpoint is at hand, from the headers of its
safetensors files; no weight is read and no torch is needed. Building the model without storage
would be exact for every family too, but needs torch and transformers on the machine that only asks
"would it fit?".
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from poros.errors import ModelError

Tensors = dict[str, tuple[int, ...]]


# --- shapes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A weight matrix that quantisation packs and LoRA can target. `name` as `self_attn.q_proj`."""

    name: str
    out_features: int
    in_features: int

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features


@dataclass(frozen=True)
class BlockShape:
    """The frozen tensors of one block.

    `others` are (name, number of elements) of what is never quantised: norms, biases, routers and
    fused experts (3-D parameters, which bitsandbytes skips).
    """

    matrices: tuple[Matrix, ...]
    others: tuple[tuple[str, int], ...]

    @property
    def num_params(self) -> int:
        """Number of elements of all tensors."""
        return sum(m.numel for m in self.matrices) + sum(size for _, size in self.others)

    @property
    def expert_params(self) -> int:
        """Number of elements that lie in mixture experts."""
        return sum(size for name, size in self.others if _EXPERT.search(name))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only language model; every count is in elements.

    `blocks` may differ from each other. `embedding_params` is the token embedding, `head_params`
    the output matrix (0 when tied), `other_params` whatever else lies outside the blocks.
    `intermediate_size` counts what one token passes through: of a mixture, its active experts.
    `eager_attention` is set for families whose attention transformers runs with all scores in
    memory. `source` says where the shapes were read.
    """

    name: str
    source: str
    block_prefix: str
    blocks: tuple[BlockShape, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    embedding_params: int
    head_params: int
    other_params: int
    activation: str
    eager_attention: bool
    active_expert_share: float

    @property
    def num_blocks(self) -> int:
        """Number of decoder layers."""
        return len(self.blocks)

    @cached_property
    def kinds(self) -> Mapping[BlockShape, int]:
        """The distinct blocks, each with how often it occurs."""
        return Counter(self.blocks)

    @property
    def resident_params(self) -> int:
        """Elements outside the blocks: embeddings, head, final norm."""
        return self.embedding_params + self.head_params + self.other_params

    @property
    def num_params(self) -> int:
        """Elements of the whole model."""
        return self.resident_params + sum(b.num_params * n for b, n in self.kinds.items())


_EXPERT = re.compile(r"(^|\.)experts\.")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_ROUTER = re.compile(r"(^|\.)(gate|router|router\.\w+)\.weight$")
NORM = re.compile(r"(norm\w*|(^|\.)ln_\w+)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
# Buffers that older checkpoints stored: causal masks and rotary frequencies, rebuilt at load.
_BUFFER = re.compile(r"(\.attn|\.attention)\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
_BLOCK = re.compile(r"^((?:[^.]+\.)*?)(\d+)\.(.+)$")
_TRANSPOSED = {"gpt2", "openai-gpt"}  # transformers' Conv1D stores (in, out)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: a multimodal one nests it in `text_config`."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(config)
    outer = {k: config[k] for k in ("tie_word_embeddings", "quantization_config") if k in config}
    return {**outer, **nested}


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


_REQUIRED = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head",),
    "vocab_size": (),
}


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of the config, by its usual or its older name; of a list (one a block) the largest.

    Raises:
        ModelError: it is no positive number, or missing without a default.
    """
    value = _first(config, key, *_REQUIRED.get(key, ()))
    value = default if value is None else value
    value = max(value, default=None) if isinstance(value, list) else value
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json of a {config.get('model_type')} model: {key} is {value!r}, "
            "wanted a positive number"
        )
    return value


def _complete(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The config itself, or filled with its family's defaults when it leaves sizes out.

    Raises:
        ModelError: sizes are missing and transformers, which knows the defaults, is of no help.
    """
    missing = [key for key, older in _REQUIRED.items() if _first(config, key, *older) is None]
    if not missing:
        return config
    try:
        from transformers import AutoConfig

        filled: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except (ImportError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name}: config.json gives no {', '.join(missing)}, and the defaults of model type "
            f"{config.get('model_type')!r} are not known here ({error}). Install transformers, or "
            "add the missing keys to config.json"
        ) from None
    return filled


def shape_from_tensors(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], source: str
) -> ModelShape:
    """The shape of a model, from its config and the shape of every one of its parameters.

    `tensors` maps full names (`model.layers.0.self_attn.q_proj.weight`) to shapes; the block list
    is the group `<prefix>.<n>.` with the most elements.

    Raises:
        ModelError: no numbered block list, a gap in it, or sizes that the config leaves out.
    """
    config = _complete(_text(config), name)
    groups: dict[str, dict[int, Tensors]] = {}
    outside: Tensors = {}
    for key, size in tensors.items():
        if _BUFFER.search(key):
            continue
        found = _BLOCK.match(key)
        if found is None:
            outside[key] = tuple(size)
        else:
            group = groups.setdefault(found[1], {})
            group.setdefault(int(found[2]), {})[found[3]] = tuple(size)
    if not groups:
        raise ModelError(
            f"{name}: none of {len(tensors)} tensors is named like a numbered block "
            "(such as model.layers.0.mlp.up_proj.weight), so there is nothing to stream; "
            "give a decoder-only language model"
        )

    def numel(prefix: str) -> int:
        return sum(prod(s) for block in groups[prefix].values() for s in block.values())

    prefix = max(groups, key=numel)
    for other in groups.keys() - {prefix}:
        for index, block in groups[other].items():
            outside.update({f"{other}{index}.{key}": size for key, size in block.items()})

    num_blocks = _size(config, "num_hidden_layers")
    lost = [i for i in range(num_blocks) if i not in groups[prefix]]
    if lost:
        raise ModelError(
            f"{name}: the config says {num_blocks} blocks, but block {lost[0]} "
            f"({prefix}{lost[0]}) has no tensors in the checkpoint: fetch its missing files"
        )
    # A checkpoint may hold further layers that the model does not build (multi-token prediction).
    transposed = config.get("model_type") in _TRANSPOSED
    blocks = tuple(_block_shape(groups[prefix][i], transposed) for i in range(num_blocks))

    heads = {key: prod(size) for key, size in outside.items() if _HEAD.search(key)}
    tables = {k: prod(s) for k, s in outside.items() if len(s) == 2 and k not in heads}
    embedding = max(tables.values(), default=0)
    tied = _first(config, "tie_word_embeddings")
    tied = not heads if tied is None else bool(tied)
    hidden, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    inter = _size(config, "intermediate_size", _first(config, "n_inner", "ffn_dim") or 4 * hidden)
    experts, share = _num_experts(config), 1.0
    if experts:
        active = _size(config, "num_experts_per_tok", 1)
        share = active / experts
        inter = max(inter, active * _size(config, "moe_intermediate_size", inter))
    return ModelShape(
        name=name,
        source=source,
        block_prefix=prefix.rstrip("."),
        blocks=blocks,
        hidden_size=hidden,
        intermediate_size=inter,
        num_attention_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads),
        head_dim=_size(config, "head_dim", hidden // num_heads),
        vocab_size=_size(config, "vocab_size"),
        tied=tied,
        embedding_params=embedding,
        # A checkpoint of the bare decoder leaves out the head that training needs all the same.
        head_params=0 if tied else max(heads.values(), default=embedding),
        other_params=sum(prod(s) for k, s in outside.items() if k not in heads) - embedding,
        activation=str(_first(config, "hidden_act", "hidden_activation", "activation_function")),
        eager_attention=_eager_attention(config),
        active_expert_share=share,
    )


def _block_shape(tensors: Tensors, transposed: bool) -> BlockShape:
    matrices, others = [], []
    for key, size in sorted(tensors.items()):
        # transformers fuses experts into 3-D parameters, whatever the checkpoint's own layout.
        packed = key.endswith(".weight") and len(size) == 2
        if packed and not _EXPERT.search(key) and not _ROUTER.search(key):
            rows, columns = reversed(size) if transposed else size
            matrices.append(Matrix(key.removesuffix(".weight"), rows, columns))
        else:
            others.append((key, prod(size)))
    return BlockShape(tuple(matrices), tuple(others))


def _eager_attention(config: Mapping[str, Any]) -> bool:
    # Soft-capped scores and attention sinks have no fused kernel in torch.
    return bool(config.get("attn_logit_softcapping")) or config.get("model_type") == "gpt_oss"


def _num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a mixture; 0 for a dense model."""
    key = next((k for k in _EXPERT_KEYS if config.get(k)), None)
    found = 0 if key is None else _size(config, key)
    return found if found > 1 else 0


# --- from config.json alone ---------------------------------------------------------------------


def _gated(
    *,
    qkv_bias: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    qk_norm: bool = False,
    fused: bool = False,
) -> Callable[[Mapping[str, Any]], Tensors]:
    """Tensors of a llama-like block; further biases are keys of its config."""

    def block(config: Mapping[str, Any]) -> Tensors:
        hidden, inter = _size(config, "hidden_size"), _size(config, "intermediate_size")
        heads = _size(config, "num_attention_heads")
        head_dim = _size(config, "head_dim", hidden // heads)
        q, kv = heads * head_dim, _size(config, "num_key_value_heads", heads) * head_dim
        o_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
        bias = qkv_bias or o_bias
        if fused:
            matrices = {"self_attn.qkv_proj": (q + 2 * kv, hidden, bias)}
            matrices["mlp.gate_up_proj"] = (2 * inter, hidden, mlp_bias)
        else:
            widths = {"q": q, "k": kv, "v": kv}
            matrices = {f"self_attn.{n}_proj": (w, hidden, bias) for n, w in widths.items()}
            matrices |= {f"mlp.{n}_proj": (inter, hidden, mlp_bias) for n in ("gate", "up")}
        matrices["self_attn.o_proj"] = (hidden, q, o_bias)
        matrices["mlp.down_proj"] = (hidden, inter, mlp_bias)
        tensors: Tensors = {f"{norm}.weight": (hidden,) for norm in norms}
        if qk_norm:
            tensors |= {f"self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        return tensors | _linears(matrices)

    return block


def _linears(matrices: Mapping[str, tuple[int, int, bool]]) -> Tensors:
    tensors: Tensors = {}
    for name, (rows, columns, bias) in matrices.items():
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
    return tensors


def _layer_norms(hidden: int, *names: str) -> Tensors:
    return {f"{name}.{part}": (hidden,) for name in names for part in ("weight", "bias")}


def _gpt2(config: Mapping[str, Any]) -> Tensors:
    h = _size(config, "hidden_size")
    inter = int(config.get("n_inner") or 4 * h)
    # Stored (in, out): see _TRANSPOSED.
    sizes = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h)}
    sizes |= {"mlp.c_fc": (h, inter), "mlp.c_proj": (inter, h)}
    tensors = _layer_norms(h, "ln_1", "ln_2")
    for name, size in sizes.items():
        tensors |= {f"{name}.weight": size, f"{name}.bias": (size[1],)}
    return tensors


def _gpt_neox(config: Mapping[str, Any]) -> Tensors:
    h, inter = _size(config, "hidden_size"), _size(config, "intermediate_size")
    bias = bool(config.get("attention_bias", True))
    matrices = {
        "attention.query_key_value": (3 * h, h, bias),
        "attention.dense": (h, h, bias),
        "mlp.dense_h_to_4h": (inter, h, True),
        "mlp.dense_4h_to_h": (h, inter, True),
    }
    return _layer_norms(h, "input_layernorm", "post_attention_layernorm") | _linears(matrices)


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_FAMILIES: dict[str, Callable[[Mapping[str, Any]], Tensors]] = {
    "llama": _gated(),
    "granite": _gated(),
    "smollm3": _gated(),
    "mistral": _gated(),
    "qwen2": _gated(qkv_bias=True),
    "qwen3": _gated(qk_norm=True),
    "gemma": _gated(),
    "gemma2": _gated(norms=_SANDWICH),
    "gemma3_text": _gated(norms=_SANDWICH, qk_norm=True),
    "phi3": _gated(fused=True),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
# What transformers assumes when config.json does not say.
_TIED_FAMILIES = {"gemma", "gemma2", "gemma3_text", "gpt2", "smollm3"}
_HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}


def _tensors_of_config(config: dict[str, Any], name: str) -> Tensors:
    """Names and shapes of every tensor that a model of this config has.

    Raises:
        ModelError: the config alone does not tell them.
    """
    family = str(config.get("model_type"))
    if _num_experts(config):
        raise ModelError(
            f"{name}: a mixture of {_num_experts(config)} experts ({family}) cannot be sized from "
            "config.json alone: download its safetensors files and give their folder"
        )
    if family not in _FAMILIES:
        raise ModelError(
            f"{name}: the tensors of model type {family!r} cannot be told from config.json alone "
            f"(known: {', '.join(_FAMILIES)}): give a folder with its safetensors files"
        )
    config.setdefault("tie_word_embeddings", family in _TIED_FAMILIES)
    if family in _HEAD_DIMS:
        config.setdefault("head_dim", _HEAD_DIMS[family])
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    layers, block = _size(config, "num_hidden_layers"), _FAMILIES[family](config)
    if family == "gpt2":
        prefix, outside = "transformer.h", _layer_norms(hidden, "transformer.ln_f")
        outside |= {"transformer.wte.weight": (vocab, hidden)}
        outside |= {"transformer.wpe.weight": (int(config.get("n_positions", 1024)), hidden)}
    elif family == "gpt_neox":
        prefix, outside = "gpt_neox.layers", _layer_norms(hidden, "gpt_neox.final_layer_norm")
        outside |= {"gpt_neox.embed_in.weight": (vocab, hidden)}
    else:
        prefix, outside = "model.layers", {"model.norm.weight": (hidden,)}
        outside |= {"model.embed_tokens.weight": (vocab, hidden)}
    blocks = {f"{prefix}.{i}.{key}": size for i in range(layers) for key, size in block.items()}
    return outside | blocks


_SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _published(family: str, sizes: Sequence[int], tied: bool = False) -> dict[str, Any]:
    sized = dict(zip(_SIZE_KEYS, sizes, strict=True))
    return {"model_type": family, "tie_word_embeddings": tied, **sized}


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": _published("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-32b": _published("qwen2", (5120, 27648, 64, 40, 8, 152064)),
    "qwen2.5-72b": _published("qwen2", (8192, 29568, 80, 64, 8, 152064)),
    "llama-3.1-8b": _published("llama", (4096, 14336, 32, 32, 8, 128256)),
    "smollm2-135m": _published("llama", (576, 1536, 30, 9, 3, 49152), tied=True),
}
"""Published shapes, so that a plan of these needs no file and no network."""


# --- finding a model ----------------------------------------------------------------------------


def read_model_shape(model: str, revision: str | None = None) -> ModelShape:
    """The shape of a model: a folder, a hub id, or one of `KNOWN_MODELS`.

    Looked for in this order: a local folder; the Hugging Face cache; the published shapes (any
    case, with or without the organisation, `-Instruct` alike); the hub, from which only
    `config.json` is fetched. In a folder, safetensors headers are preferred to the config.

    Raises:
        ModelError: found nowhere, unreadable, or not told by the config alone.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _shape_of_folder(folder, folder.resolve().name)
    if folder.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"no model folder at {model}: give a folder with a config.json")
    cached = _cached_snapshot(model, revision)
    if cached is not None:
        return _shape_of_folder(cached, model)
    short = model.rsplit("/", 1)[-1].lower().removesuffix("-instruct").removeprefix("meta-")
    if short in KNOWN_MODELS:
        config = dict(KNOWN_MODELS[short])
        tensors = _tensors_of_config(config, model)
        return shape_from_tensors(model, config, tensors, "published shape")
    return _shape_of_config(_read_json(_fetch_config(model, revision)), model)


def _shape_of_folder(folder: Path, name: str) -> ModelShape:
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = "it holds a PEFT adapter: give the base model" if adapter else "give a model folder"
        raise ModelError(f"{folder} has no config.json: {hint}")
    config = _read_json(folder / "config.json")
    # The tensors of a quantised checkpoint are packed bytes: their shapes are not the model's.
    quantised = _first(_text(config), "quantization_config") is not None
    tensors = {} if quantised else _checkpoint_tensors(folder, name)
    if not tensors:
        return _shape_of_config(config, name)
    return shape_from_tensors(name, config, tensors, "safetensors headers")


def _shape_of_config(config: dict[str, Any], name: str) -> ModelShape:
    config = _complete(_text(config), name)
    return shape_from_tensors(name, config, _tensors_of_config(config, name), "config.json")


def _checkpoint_tensors(folder: Path, name: str) -> Tensors:
    """Shapes of all tensors of the folder's safetensors files; empty when it has none."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file() and index.is_file():
        try:
            files = sorted(set(_read_json(index)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError):
            raise ModelError(f"{index} has no weight_map: fetch it again") from None
    present = [file for file in files if (folder / file).is_file()]
    if not present:
        return {}
    if len(present) < len(files):
        lost = sorted(set(files) - set(present))
        raise ModelError(
            f"{name}: {len(lost)} of {len(files)} checkpoint files are missing from {folder}, "
            f"the first is {lost[0]}: finish the download"
        )
    tensors: Tensors = {}
    for file in present:
        tensors |= read_safetensors_header(folder / file)
    return tensors


def read_safetensors_header(file: Path) -> Tensors:
    """Names and shapes of the tensors of one safetensors file; reads the header only.

    The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, then JSON.

    Raises:
        ModelError: the file is cut short or is no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"{size} bytes where the header asks for {8 + length + end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}): fetch it again") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, wanted a JSON object")
    return content


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by its environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _cached_snapshot(model: str, revision: str | None) -> Path | None:
    repository = hub_cache() / f"models--{model.replace('/', '--')}"
    ref = repository / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    if commit is None:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _fetch_config(model: str, revision: str | None) -> Path:
    looked = f"{model}: no such folder, not in the cache at {hub_cache()}"
    what_to_do = f"give a model folder, a full hub id, or one of {', '.join(KNOWN_MODELS)}"
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ModelError(
            f"{looked}, and huggingface_hub is not installed to fetch its config.json: "
            f"{what_to_do}, or install huggingface_hub"
        ) from None
    if not _hub_resolves():
        raise ModelError(f"{looked}, and the hub cannot be reached: {what_to_do}")
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{looked}, not fetched from the hub ({reason}): {what_to_do}") from None


def _hub_resolves() -> bool:
    """Whether the hub's name resolves: offline, huggingface_hub retries for 20 seconds first."""
    if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return True  # the proxy resolves names
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
