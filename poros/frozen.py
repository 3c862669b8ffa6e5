"""Which tensors of a layer are frozen and where they are read: what PEFT and bitsandbytes do.

The streaming core knows bytes, modules and tensors. What an adapter is, and which attributes of a
4-bit weight are tensors, is known here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.errors import ModelError


@dataclass
class Site:
    """A place where a frozen tensor is read: `write(holder, key, view)` puts a view there.

    `name` is the tensor's name in the layout; `parameter_of` the (module, key) of a parameter.
    """

    name: str
    holder: Any
    key: str
    write: Callable[[Any, str, torch.Tensor], None]
    parameter_of: tuple[nn.Module, str] | None = None


def frozen_tensors(path: str, layer: nn.Module) -> Iterator[tuple[Site, torch.Tensor]]:
    """The frozen tensors of one block and where they are read; quantisation state included.

    Adapters never stream, frozen or not, since they may be switched or trained later. PEFT's tuner
    layers list their own children by name and hold the frozen module beside them.
    """
    adapters: set[nn.Module] = set()
    for module in layer.modules():
        listed: Any = getattr(module, "adapter_layer_names", ())
        for name in [*listed, *getattr(module, "other_param_names", ())] if listed else ():
            child = getattr(module, name.split(".")[0], None)
            adapters |= set(child.modules()) if isinstance(child, nn.Module) else set()
    for prefix, module in layer.named_modules():
        if module in adapters or hasattr(module, "adapter_layer_names"):
            continue
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            name = f"{prefix}.{key}" if prefix else key
            kind = type(parameter).__name__
            if kind == "Int8Params":
                raise ModelError(f"{path}.{name} is int8, which does not stream: use nf4 or bf16")
            yield Site(name, parameter, "data", _set_data, (module, key)), parameter
            if kind == "Params4bit":
                yield from _quantisation(path, name, parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                yield Site(name, module._buffers, key, _set_item), buffer


def _quantisation(path: str, name: str, weight: Any) -> Iterator[tuple[Site, torch.Tensor]]:
    state = weight.quant_state
    if state is None:
        raise ModelError(f"{path}.{name} is a 4-bit weight that was never quantised: load it first")
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"{path}.{name} was repacked by bitsandbytes in an evaluation on the CPU, which rounds"
            " its statistics: stream the model before evaluating it"
        )
    yield Site(f"{name}.absmax", state, "absmax", setattr), state.absmax
    if state.nested:
        yield Site(f"{name}.offset", state, "offset", setattr), state.offset
        yield Site(f"{name}.nested_absmax", state.state2, "absmax", setattr), state.state2.absmax


def _set_data(parameter: nn.Parameter, _: str, view: torch.Tensor) -> None:
    parameter.data = view


def _set_item(buffers: dict[str, torch.Tensor], key: str, view: torch.Tensor) -> None:
    buffers[key] = view


def share_code_tables(
    layer: nn.Module, device: torch.device, codes: dict[bytes, torch.Tensor]
) -> None:
    """Let 4-bit weights read one copy of each code table on `device`: they are all the same."""
    for parameter in layer.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            if part is not None:
                key = part.code.cpu().numpy().tobytes()
                part.code = codes.setdefault(key, part.code.to(device))


def stop_repacking(layer: nn.Module) -> Iterator[Callable[[], None]]:
    """Keep bitsandbytes from repacking weights for the CPU in eval mode; yields what undoes it.

    The repacking rounds the statistics and writes the weight, which streams and is read only.
    """
    name = "support_avx512bf16_for_cpu"
    for module in layer.modules():
        if getattr(module, name, False):
            setattr(module, name, False)
            yield functools.partial(setattr, module, name, True)


def guard_adapters(
    layer: nn.Module, visit: Callable[[], AbstractContextManager[None]]
) -> Iterator[Callable[[], Any]]:
    """Refuse merges, and add adapters within a `visit`; yields what undoes both.

    A merge would read and replace weights that are not there. A new adapter may be computed from
    them (DoRA's magnitude, PiSSA's factors).
    """
    for name, module in layer.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(type(module), "merge"):
            module.__dict__["merge"] = functools.partial(_refuse, f"merging into {name}")
            yield functools.partial(module.__dict__.pop, "merge")
        if hasattr(module, "adapter_layer_names") and hasattr(type(module), "update_layer"):
            added = functools.partial(_within, visit, module.update_layer)
            module.__dict__["update_layer"] = added
            yield functools.partial(module.__dict__.pop, "update_layer")


def refuse_copies(layer: nn.Module) -> Iterator[Callable[[], Any]]:
    """Refuse `copy.deepcopy`, which would copy tensors without bytes; yields what undoes it."""
    layer.__dict__["__deepcopy__"] = functools.partial(_refuse, "copying the model")
    yield functools.partial(layer.__dict__.pop, "__deepcopy__")


def _within(
    visit: Callable[[], AbstractContextManager[None]],
    update: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with visit():
        return update(*args, **kwargs)


def _refuse(what: str, *_: Any, **__: Any) -> None:
    raise ModelError(
        f"{what} needs the whole base on the device, but it streams: call poros.unstream(model)"
        " first"
    )
