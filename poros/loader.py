"""Load a base without ever putting it on the device whole.

transformers does the loading, so that every checkpoint format and weight conversion it knows
applies; only its 4-bit quantise step is replaced by one that quantises on the training device and
takes the result straight back to host memory. Quantised on the CPU instead, the double-quantised
statistics would differ in their last bits from those of a run on the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers import auto as quantizers
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from poros.errors import HardwareError, ModelError, PorosOOMError

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
    kwargs = {"dtype": dtype, "device_map": {"": target}, **kwargs}
    if quantization == "nf4":
        kwargs.setdefault("quantization_config", nf4_config(dtype))
    if quantization == "int8":
        kwargs.setdefault("quantization_config", BitsAndBytesConfig(load_in_8bit=True))
    streamed = quantization == "nf4" and nf4_load_strategy != "standard"
    if streamed or quantization == "bf16":
        kwargs["device_map"] = {"": "cpu"}
    with _named_errors(model):
        if not streamed:
            return AutoModelForCausalLM.from_pretrained(model, **kwargs)
        with _quantise_to_host(target):
            return AutoModelForCausalLM.from_pretrained(model, **kwargs)


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
def _named_errors(model: str) -> Iterator[None]:
    """Turn what goes wrong in `from_pretrained` into one message that names the model."""
    path = Path(model).expanduser()
    local = path.is_dir()
    if not local and (path.is_absolute() or model.startswith((".", "~"))):
        raise ModelError(f"model {model}: there is no such folder; check the path")
    if local and not (path / "config.json").is_file():
        raise ModelError(
            f"model {model}: the folder has no config.json; wanted a folder that save_pretrained"
            " wrote or a clone of a hub repository"
        )
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise PorosOOMError(
            f"the device ran out of memory while loading {model}: {error}",
            needed=None,
            terms={"free now": free, "of": total},
            advice="close other programs that use the GPU, or use nf4_load_strategy: streamed",
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model} cannot be loaded: {first} (wanted: a causal language model as a hub id"
            " or a local folder; offline, only models already in the cache or in a folder)"
        ) from error
