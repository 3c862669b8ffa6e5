"""`attach(model)`: find the blocks, pack their frozen tensors, hand each layer its forward.

The model keeps its classes, module names and state-dict keys. A layer *instance* gets a `forward`,
and its frozen tensors move into the store; what is trained, and every frozen tensor that more than
one place reads, stays on the device. Wrapping the layers instead would break the models that read
attributes of their layers (`attention_type` and its like) and every saved key.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from poros.core.block import Binding, Block
from poros.core.schedule import Phase
from poros.core.store import PinnedStore
from poros.core.stream import Stream
from poros.errors import ModelError
from poros.frozen import (
    Site,
    frozen_tensors,
    guard_adapters,
    refuse_copies,
    share_code_tables,
    stop_repacking,
)

_ATTRIBUTE = "_poros"


@dataclass
class Streamed:
    """What `attach` did to a model; `undo` puts its attributes back, in any order."""

    blocks: list[Block]
    store: PinnedStore
    stream: Stream
    undo: list[Callable[[], Any]]
    notes: list[str] = field(default_factory=list)


def streamed(model: nn.Module) -> Streamed | None:
    """The streaming state of `model` (or of the model it wraps), None if it is not streamed."""
    states = (module.__dict__.get(_ATTRIBUTE) for module in model.modules())
    return next((state for state in states if state is not None), None)


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's layers: the largest list of checkpointable layers.

    Raises:
        ModelError: the model has no such list.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    found = [
        (name, layers)
        for name, layers in lists
        if all(hasattr(layer, "gradient_checkpointing") for layer in layers)
    ]
    if not found:
        seen = ", ".join(f"{name} ({len(m)} x {type(m[0]).__name__})" for name, m in lists)
        inner: Any = model  # a PEFT model says little by its own class
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        raise ModelError(
            f"{type(inner).__name__} has no list of decoder layers that Poros recognises; found:"
            f" {seen or 'none'}; wanted: a ModuleList of transformers' GradientCheckpointingLayer"
        )
    return max(found, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))


def attach(
    model: nn.Module,
    num_slots: int | Callable[[int, int, torch.device], int],
    *,
    device: torch.device,
    micro_rows: int | None = None,
    poison: bool = False,
) -> Streamed:
    """Make every block of `model` stream through `num_slots` slots on `device`, in place.

    `num_slots` may be a function of (bytes of the largest packed block, number of blocks, device),
    asked when everything that stays is on the device already. Frozen tensors of the blocks may lie
    on any device; each block's are freed as soon as they are packed.

    Raises:
        ModelError: no block list, a base that does not stream, or a model streamed already.
    """
    if streamed(model) is not None:
        raise ModelError("the model is streamed already: call poros.unstream(model) first")
    path, layers = find_blocks(model)
    hooked = [f"{path}.{i}" for i, layer in enumerate(layers) if "forward" in layer.__dict__]
    if hooked:
        raise ModelError(
            f"{hooked[0]} has a forward of its own already (hooks of accelerate?): load the model"
            " without offloading by device_map"
        )
    undo: list[Callable[[], Any]] = []
    frozen = [list(frozen_tensors(f"{path}.{i}", layer)) for i, layer in enumerate(layers)]
    readers = Counter(
        id(tensor)
        for module in model.modules()
        for tensor in [*module._parameters.values(), *module._buffers.values()]
    )
    store, bindings, codes = PinnedStore(device), [], {}  # type: ignore[var-annotated]
    for i, layer in enumerate(layers):
        inside = Counter(id(tensor) for _, tensor in frozen[i])
        # A tensor that another place reads too (tied or shared) must not move from under it.
        own = [(s, t) for s, t in frozen[i] if readers.get(id(t), 0) <= inside[id(t)]]
        share_code_tables(layer, device, codes)
        undo += stop_repacking(layer)
        bindings.append(_pack(own, store, device))
        frozen[i] = own = []
    _move_rest(model, device)

    if not isinstance(num_slots, int):
        num_slots = num_slots(max(lay.nbytes for lay in store.layouts), len(layers), device)
    stream = Stream(store, num_slots, device, poison)
    blocks = []
    for i, (layer, binding) in enumerate(zip(layers, bindings, strict=True)):
        block = Block(i, layer, binding, stream, micro_rows)
        layer.__dict__["forward"] = functools.wraps(block.inner)(functools.partial(block))
        undo.append(functools.partial(layer.__dict__.pop, "forward"))
        _save_real_tensors(block, undo)
        undo += refuse_copies(layer)
        undo += guard_adapters(layer, functools.partial(block.visit, Phase.INFERENCE))
        blocks.append(block)
    _keep_checkpointing_off(model, layers, undo)
    state = model.__dict__[_ATTRIBUTE] = Streamed(blocks, store, stream, undo)
    undo.append(functools.partial(model.__dict__.pop, _ATTRIBUTE))
    return state


def detach(model: nn.Module) -> None:
    """Undo `attach`: an ordinary model, its base on the device in tensors of its own.

    Raises:
        ModelError: the model is not streamed.
    """
    state = streamed(model)
    if state is None:
        raise ModelError("the model is not streamed")
    for block in state.blocks:
        views = block.host_views().items()
        block.binding.point({n: view.to(state.stream.device, copy=True) for n, view in views})
    for undo in state.undo:
        undo()


def _pack(
    own: list[tuple[Site, torch.Tensor]], store: PinnedStore, device: torch.device
) -> Binding:
    """Pack the tensors as the next block of the store and put placeholders in their places."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for site, tensor in own:
        site.name = names.setdefault(id(tensor), site.name)
        tensors[site.name] = tensor.detach()
    store.add(tensors)
    placeholders = {name: _placeholder(tensor, device) for name, tensor in tensors.items()}
    binding = Binding([site for site, _ in own], placeholders)
    binding.point(placeholders)
    return binding


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Shape and dtype of `tensor` over one element of all ones: NaN in floating point."""
    ones = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8, device=device)
    one = torch.ones(1, dtype=tensor.dtype, device=device)
    return (one if tensor.dtype == torch.bool else ones.view(tensor.dtype))[0].expand(tensor.shape)


# -- what stays ------------------------------------------------------------------------------------


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Everything that did not become a placeholder moves to `device`, plain attributes included."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for attributes in (module._buffers, module.__dict__):
            for key, value in attributes.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    attributes[key] = value.to(device)
        if "hf_device_map" in module.__dict__:
            # The trainers read it to learn where the model computes.
            module.__dict__["hf_device_map"] = {"": device}


def _save_real_tensors(block: Block, undo: list[Callable[[], Any]]) -> None:
    """Let `state_dict()` hold the block's bytes (views of the store, on the CPU)."""

    def before(*_: Any) -> None:
        block.binding.point(block.host_views())

    def after(*_: Any) -> None:
        block.binding.point(block.binding.placeholders)

    undo.append(block.layer.register_state_dict_pre_hook(before).remove)
    undo.append(block.layer.register_state_dict_post_hook(after).remove)


def _keep_checkpointing_off(
    model: nn.Module, layers: nn.ModuleList, undo: list[Callable[[], Any]]
) -> None:
    """A block recomputes once: its layer's own gradient checkpointing would recompute it again."""

    def off() -> None:
        for layer in layers:
            layer.__dict__["gradient_checkpointing"] = False

    def switch(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        off()

    off()
    name = "_set_gradient_checkpointing"  # what every way to switch it on ends in
    for module in model.modules():
        if hasattr(type(module), name):
            module.__dict__[name] = functools.partial(switch, getattr(module, name))
            undo.append(functools.partial(module.__dict__.pop, name))
