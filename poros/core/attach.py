"""`attach(model)`: find the blocks, pack their frozen tensors, hand each layer its forward.

The model keeps its classes, module names and state-dict keys. A layer *instance* gets a `forward`,
and its frozen tensors move into the store; everything that is trained, and every frozen tensor that
more than one place reads, stays on the device. Wrapping the layers instead would break the models
that read attributes of their layers (`attention_type` and its like) and every saved key.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from poros.core.block import Binding, Block, Site
from poros.core.store import PinnedStore
from poros.core.stream import Stream
from poros.errors import ModelError

_ATTRIBUTE = "_poros"


@dataclass
class Streamed:
    """What `attach` did to a model: the blocks, their store and their stream."""

    blocks: list[Block]
    store: PinnedStore
    stream: Stream
    path: str  # name of the block list in the model
    notes: list[str] = field(default_factory=list)


def streamed(model: nn.Module) -> Streamed | None:
    """The streaming state of `model` (or of the model it wraps), None if it is not streamed."""
    for module in model.modules():
        if (found := module.__dict__.get(_ATTRIBUTE)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder's layers: the largest list of checkpointable layers.

    Raises:
        ModelError: the model has no such list.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    found = [
        (name, blocks)
        for name, blocks in lists
        if all(hasattr(layer, "gradient_checkpointing") for layer in blocks)
    ]
    if not found:
        seen = (
            ", ".join(f"{name} ({type(m[0]).__name__} x {len(m)})" for name, m in lists) or "none"
        )
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers that Poros recognises; found:"
            f" {seen}; wanted: a ModuleList of transformers' GradientCheckpointingLayer"
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
    asked when everything that stays is on the device already.
    Frozen tensors of the blocks may lie on any device; each block's are freed as soon as they are
    packed. What does not stream is moved to `device`.

    Raises:
        ModelError: no block list, a base that does not stream, or a model streamed already.
    """
    if streamed(model) is not None:
        raise ModelError("the model is streamed already: call poros.unstream(model) first")
    path, layers = find_blocks(model)
    for name, module in model.named_modules():
        if "forward" in module.__dict__ and (module in set(layers)):
            raise ModelError(
                f"{name} has a forward of its own already (accelerate hooks?): load the model"
                " without device_map='auto' offloading"
            )
    frozen = [_frozen(f"{path}.{i}", layer) for i, layer in enumerate(layers)]
    uses = Counter(id(t) for _, t in _tensors(model))
    inside = [Counter(id(tensor) for _, tensor in sites) for sites in frozen]

    store = PinnedStore(device)
    codes: dict[bytes, torch.Tensor] = {}
    bindings = []
    for index, layer in enumerate(layers):
        # A tensor that another place reads too (tied or shared) must not move from under it.
        own = [
            (site, tensor)
            for site, tensor in frozen[index]
            if uses[id(tensor)] == inside[index][id(tensor)] or id(tensor) not in uses
        ]
        bindings.append(_pack(layer, own, store, device, codes))
        frozen[index] = []
    _move_rest(model, device)

    if not isinstance(num_slots, int):
        largest = max(layout.nbytes for layout in store.layouts)
        num_slots = num_slots(largest, len(layers), device)
    stream = Stream(store, num_slots, device, poison)
    blocks = []
    for index, (layer, binding) in enumerate(zip(layers, bindings, strict=True)):
        block = Block(index, layer, binding, stream, micro_rows)
        layer.__dict__["forward"] = functools.wraps(block.inner)(functools.partial(block))
        _save_real_tensors(layer, block, store)
        blocks.append(block)
    state = Streamed(blocks, store, stream, path)
    _keep_checkpointing_off(model, layers)
    model.__dict__[_ATTRIBUTE] = state
    return state


def detach(model: nn.Module) -> None:
    """Undo `attach`: an ordinary model, its base on the device in tensors of its own.

    Raises:
        ModelError: the model is not streamed.
    """
    state = streamed(model)
    if state is None:
        raise ModelError("the model is not streamed")
    device = state.stream.device
    for block, buffer, layout in zip(
        state.blocks, state.store.buffers, state.store.layouts, strict=True
    ):
        views = layout.views(buffer)
        block.binding.point({name: view.to(device, copy=True) for name, view in views.items()})
        block.layer.__dict__.pop("forward")
        for handle in block.handles:
            handle.remove()
        for module in block.layer.modules():
            if (before := module.__dict__.pop(_REPACK_BEFORE, None)) is not None:
                module.support_avx512bf16_for_cpu = before
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
        if _ORIGINAL in module.__dict__:
            module.__dict__.pop(_ORIGINAL)
            module.__dict__.pop("_set_gradient_checkpointing")


# -- what streams ----------------------------------------------------------------------------------


def _tensors(root: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Every registered tensor with the module that holds it, once a holder."""
    for module in root.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                yield module, tensor


def _adapter_modules(layer: nn.Module) -> set[nn.Module]:
    """Modules of PEFT adapters inside `layer`: never packed, since they may be trained or switched.

    PEFT's tuner layers name their own children in `adapter_layer_names` and `other_param_names`;
    `modules_to_save` wrappers keep the frozen original beside the trained copies.
    """
    found: set[nn.Module] = set()
    for module in layer.modules():
        if not hasattr(module, "adapter_layer_names"):
            continue
        listed: Any = module.adapter_layer_names
        names = [*listed, *getattr(module, "other_param_names", ())]
        for name in {name.split(".")[0] for name in names}:
            child = getattr(module, name, None)
            if isinstance(child, nn.Module):
                found |= set(child.modules())
    return found


def _frozen(path: str, layer: nn.Module) -> list[tuple[Site, torch.Tensor]]:
    """The frozen tensors of one block and where they are read; quantisation state included."""
    adapters = _adapter_modules(layer)
    sites: list[tuple[Site, torch.Tensor]] = []
    for prefix, module in layer.named_modules():
        # A tuner layer's direct parameters are adapter parts too (IA3 vectors, magnitudes).
        if module in adapters:
            continue
        for key, parameter in module._parameters.items():
            if (
                parameter is None
                or parameter.requires_grad
                or hasattr(module, "adapter_layer_names")
            ):
                continue
            name = f"{prefix}.{key}" if prefix else key
            kind = type(parameter).__name__
            if kind == "Int8Params":
                raise ModelError(
                    f"{path}.{name} is int8, which does not stream: load with nf4 or bf16"
                )
            sites.append((Site(name, parameter, "data", _set_data), parameter))
            if kind == "Params4bit":
                sites += _quantisation(f"{path}.{name}", name, parameter)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = f"{prefix}.{key}" if prefix else key
                sites.append((Site(name, module._buffers, key, _set_item), buffer))
    return sites


def _quantisation(full_name: str, name: str, weight: Any) -> list[tuple[Site, torch.Tensor]]:
    state = weight.quant_state
    if state is None:
        raise ModelError(f"{full_name} is a 4-bit weight that was never quantised: load it first")
    if getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"{full_name} was repacked by bitsandbytes in an evaluation on the CPU, which rounds"
            " its statistics: stream the model before evaluating it"
        )
    sites = [(Site(f"{name}.absmax", state, "absmax", setattr), state.absmax)]
    if state.nested:
        sites.append((Site(f"{name}.offset", state, "offset", setattr), state.offset))
        nested = Site(f"{name}.nested_absmax", state.state2, "absmax", setattr)
        sites.append((nested, state.state2.absmax))
    return sites


def _set_data(parameter: nn.Parameter, _: str, view: torch.Tensor) -> None:
    parameter.data = view


def _set_item(buffers: dict[str, torch.Tensor], key: str, view: torch.Tensor) -> None:
    buffers[key] = view


_REPACK_BEFORE = "_poros_repack"
_ORIGINAL = "_poros_checkpointing"


def _pack(
    layer: nn.Module,
    own: list[tuple[Site, torch.Tensor]],
    store: PinnedStore,
    device: torch.device,
    codes: dict[bytes, torch.Tensor],
) -> Binding:
    tensors: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    binding = Binding()
    for site, tensor in own:
        site.name = first.setdefault(id(tensor), site.name)
        tensors[site.name] = tensor.detach()
        binding.sites.append(site)
    store.add(tensors)
    for name, tensor in tensors.items():
        binding.placeholders[name] = _placeholder(tensor, device)
    del tensors
    names = {id(site.holder): site.name for site in binding.sites if site.key == "data"}
    for module in layer.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in names:
                continue
            binding.parameters.append((module, key, parameter, names[id(parameter)]))
            if (state := getattr(parameter, "quant_state", None)) is not None:
                state.code = _shared(state.code, device, codes)
                if state.nested:
                    state.state2.code = _shared(state.state2.code, device, codes)
        if getattr(module, "support_avx512bf16_for_cpu", False):
            # bitsandbytes would repack a weight for the CPU in eval mode, with rounded statistics.
            module.__dict__[_REPACK_BEFORE] = module.support_avx512bf16_for_cpu
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    binding.point(binding.placeholders)
    return binding


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    ones = torch.full((tensor.element_size(),), 0xFF, dtype=torch.uint8, device=device)
    if tensor.dtype == torch.bool:
        ones.fill_(1)
    return (
        ones.view(tensor.dtype).expand(tensor.shape) if tensor.dim() else ones.view(tensor.dtype)[0]
    )


def _shared(
    code: torch.Tensor, device: torch.device, codes: dict[bytes, torch.Tensor]
) -> torch.Tensor:
    key = code.cpu().numpy().tobytes()
    return codes.setdefault(key, code.to(device))


# -- what stays ------------------------------------------------------------------------------------


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Everything that did not become a placeholder moves to `device`, plain attributes included."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.device != device:
                    parameter.data = parameter.data.to(device)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[key] = buffer.to(device)
            for key, value in module.__dict__.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    module.__dict__[key] = value.to(device)
    for module in model.modules():
        if "hf_device_map" in module.__dict__:
            # The trainers read it to learn where the model computes.
            module.hf_device_map = {"": device}  # type: ignore[assignment]


def _save_real_tensors(layer: nn.Module, block: Block, store: PinnedStore) -> None:
    """Let `state_dict()` hold the block's bytes (views of the store, on the CPU)."""

    def before(*_: Any) -> None:
        block.binding.point(store.layouts[block.index].views(store.buffers[block.index]))

    def after(*_: Any) -> None:
        block.binding.point(block.binding.placeholders)

    block.handles = [
        layer.register_state_dict_pre_hook(before),
        layer.register_state_dict_post_hook(after),
    ]


def _keep_checkpointing_off(model: nn.Module, layers: nn.ModuleList) -> None:
    """A block recomputes once: its layer's own gradient checkpointing would recompute it again."""
    for module in model.modules():
        original = getattr(module, "_set_gradient_checkpointing", None)
        if original is None:
            continue

        def switch(*args: Any, _original: Any = original, **kwargs: Any) -> None:
            _original(*args, **kwargs)
            for layer in layers:
                layer.__dict__["gradient_checkpointing"] = False

        module.__dict__["_set_gradient_checkpointing"] = switch
        module.__dict__[_ORIGINAL] = True
    for layer in layers:
        layer.__dict__["gradient_checkpointing"] = False
