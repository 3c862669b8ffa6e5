"""Load a base without ever putting it on the device whole, and its tokenizer.

transformers does the loading, so that every checkpoint format and weight conversion it knows
applies; only its 4-bit quantise step is replaced by one that quantises on the training device and
takes the result straight back to host memory. Quantised on the CPU instead, the double-quantised
statistics would differ in their last bits from those of a run on the GPU.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers import auto as quantizers
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros.errors import HardwareError, ModelError, PorosOOMError
from poros.plan import Plan
from poros.units import parse_size

_SWAP = threading.Lock()


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The training device: the present CUDA device if there is one, else the CPU.

    Raises:
        HardwareError: CUDA was asked for and torch sees none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            build = torch.version.cuda or "none: this is a CPU build"
            raise HardwareError(
                f"device: cuda was asked for, but torch {torch.__version__} sees no CUDA device"
                f" (CUDA of the build: {build}); check `poros doctor`, or set device: cpu"
            )
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def nf4_config(compute_dtype: torch.dtype = torch.bfloat16) -> BitsAndBytesConfig:
    """NF4 with double quantisation (https://arxiv.org/abs/2305.14314), the default of every run."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def load(
    model: str,
    *,
    quantization: str = "nf4",
    nf4_load_strategy: str = "auto",
    device: str | torch.device = "auto",
    dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal LM, its base in host memory; `model` is a hub id or a folder.

    `quantization` is `nf4`, `bf16` (the base as it is, in `dtype`) or `int8` (on the device: it
    does not stream). `nf4_load_strategy` `streamed` (what `auto` means) quantises tensor by
    tensor on `device` and keeps the result in host memory; `standard` lets transformers put the
    whole quantised model on the device. `kwargs` go to `from_pretrained`.

    Raises:
        ModelError: no such model, or not one that transformers can load.
        HardwareError: CUDA was asked for and is not there.
        PorosOOMError: the device ran out of memory while loading.
    """
    target = pick_device(device)
    if quantization == "bf16_bitwise":
        quantization = "bf16"
    if quantization not in ("nf4", "bf16", "int8"):
        raise ModelError(f"quantization {quantization!r} is unknown: use nf4, bf16 or int8")
    if nf4_load_strategy not in ("auto", "streamed", "standard"):
        raise ModelError(
            f"nf4_load_strategy {nf4_load_strategy!r} is unknown: use auto, streamed or standard"
        )
    kwargs = {**find_model(model), "dtype": dtype, "device_map": {"": target}, **kwargs}
    if quantization == "nf4":
        kwargs.setdefault("quantization_config", nf4_config(dtype))
    if quantization == "int8":
        kwargs.setdefault("quantization_config", BitsAndBytesConfig(load_in_8bit=True))
    streamed = quantization == "nf4" and nf4_load_strategy != "standard"
    if streamed or quantization == "bf16":
        kwargs["device_map"] = {"": "cpu"}
    wanted = "a causal language model whose files are whole and of a kind that transformers knows"
    with memory_errors(target, f"loading {model}"), _named_errors(model, "it", wanted):
        if not streamed:
            return AutoModelForCausalLM.from_pretrained(model, **kwargs)
        with _quantise_to_host(target):
            return AutoModelForCausalLM.from_pretrained(model, **kwargs)


def load_tokenizer(model: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of `model`, with a padding token; `kwargs` go to `from_pretrained`.

    Raises:
        ModelError: no such model, or no tokenizer that transformers can load.
    """
    found = find_model(model)
    with _named_errors(model, "its tokenizer", "tokenizer files beside the model"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, **found, **kwargs)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # built from nothing, without a word
        raise ModelError(
            f"model {model}: its tokenizer has no vocabulary; wanted tokenizer files, such as"
            " tokenizer.json, beside the model"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_model(model: str) -> dict[str, Any]:
    """What `from_pretrained` needs to know beside the name: whether to look in the cache only.

    Offline it would otherwise try the hub for half a minute a file.

    Raises:
        ModelError: no such folder, a folder without a model, or no such model on the hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return {}
        adapter = (path / "adapter_config.json").is_file()
        held = "a PEFT adapter: name the model that it was trained on" if adapter else "none"
        raise ModelError(
            f"model {model}: wanted a folder with a config.json, as save_pretrained writes it or a"
            f" clone of a hub repository; found {held}"
        )
    if path.exists():
        raise ModelError(f"model {model} is a file; wanted a model folder or a hub id")
    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"model {model}: there is no such folder; check the path")
    try:
        HfApi().model_info(model, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"model {model} is no folder here and no model on the hub that you may read; check the"
            " name, or log in with `hf auth login`"
        ) from error
    except HfHubHTTPError:
        pass  # the hub answered: from_pretrained says more
    except Exception:
        # No connection; the hub's releases differ in the HTTP client, and so in its errors.
        return {"local_files_only": True}
    return {}


@contextmanager
def _quantise_to_host(device: torch.device) -> Iterator[None]:
    """Let transformers' 4-bit quantizer work on `device` and leave its results in host memory."""

    class QuantiseToHost(Bnb4bitQuantize):
        def convert(  # type: ignore[override]
            self, input_dict: dict[str, Any], **kwargs: Any
        ) -> dict[str, Any]:
            moved = {
                name: (value[0] if isinstance(value, list) else value).to(device)
                for name, value in input_dict.items()
            }
            return {
                name: value.to("cpu") for name, value in super().convert(moved, **kwargs).items()
            }

    class HostQuantizer(Bnb4BitHfQuantizer):
        def get_quantize_ops(self) -> Bnb4bitQuantize:
            return QuantiseToHost(self)  # type: ignore[no-untyped-call]

    mapping = quantizers.AUTO_QUANTIZER_MAPPING
    with _SWAP:
        before = mapping["bitsandbytes_4bit"]
        mapping["bitsandbytes_4bit"] = HostQuantizer
        try:
            yield
        finally:
            mapping["bitsandbytes_4bit"] = before


@contextmanager
def memory_errors(device: torch.device, doing: str, plan: Plan | None = None) -> Iterator[None]:
    """Turn out-of-memory while `doing` something into `PorosOOMError` with the sizes known."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).strip().split(" GPU ")[0]
        terms = {f"planned: {name}": size for name, size in plan.terms.items()} if plan else {}
        needed = free = None
        if device.type == "cuda":
            unused, total = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_allocated(device)
            terms |= {"held by this process": held, "free on the card": unused, "of": total}
            if asked := re.search(r"Tried to allocate ([\d.]+ \w+)", first):
                needed = held + parse_size(asked[1])
                free = unused + torch.cuda.memory_reserved(device)
        raise PorosOOMError(
            f"out of memory on {device} while {doing}: {first}",
            needed=needed,
            free=free,
            terms=terms,
            advice="halve block_size (4 -> 2 -> 1), then max_seq_length or batch_size, then"
            " lora_rank; close other programs that use the GPU",
        ) from error


@contextmanager
def _named_errors(model: str, what: str, wanted: str) -> Iterator[None]:
    """Turn what goes wrong in `from_pretrained` into one message that names the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model}: {what} cannot be loaded: {first}\nwanted {wanted}; offline, only"
            " what is in the cache or in a folder is found"
        ) from error
