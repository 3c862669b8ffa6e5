"""One decoder layer run in visits: the autograd function, the micro-row loop, the binding.

Each block is one `autograd.Function` whose inputs are every tensor of the call and the block's
trainable parameters. Its forward runs the layer without a graph; its backward recomputes with a
graph and differentiates it inside the same visit. The alternative, checkpointing with hooks that
move weights in and out, leaves the graph's lifetime to the framework: a graph kept one moment too
long reads another block's bytes without a word ([Note: visit] in `poros.core`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from poros.core.boundary import Boundary, no_cast_cache
from poros.core.schedule import Phase
from poros.core.stream import Stream
from poros.errors import ModelError, StreamError


@dataclass
class Site:
    """A place in a module tree where a frozen tensor is read: an attribute of `holder`.

    `write(holder, key, value)` puts a view there; `name` is the tensor's name in the layout.
    """

    name: str
    holder: Any
    key: str
    write: Callable[[Any, str, torch.Tensor], None]


@dataclass
class Binding:
    """Points a block's frozen tensors at a slot, and back at placeholders that hold no bytes.

    A placeholder has the tensor's shape and dtype over one element of all ones (NaN in floating
    point), so that a read outside a visit shows, and costs no memory.
    """

    sites: list[Site] = field(default_factory=list)
    placeholders: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: list[tuple[nn.Module, str, nn.Parameter, str]] = field(default_factory=list)

    def point(self, views: dict[str, torch.Tensor]) -> None:
        """Let every site read from `views`."""
        for site in self.sites:
            site.write(site.holder, site.key, views[site.name])

    def check(self, block: int) -> None:
        """Raise StreamError if a frozen parameter was replaced or made trainable meanwhile."""
        for module, key, parameter, name in self.parameters:
            if module._parameters.get(key) is not parameter:
                raise StreamError(
                    f"block {block}: {name} is no longer the tensor that streams (merged or"
                    " replaced?): call poros.unstream(model) before changing the base"
                )
            if parameter.requires_grad:
                raise StreamError(
                    f"block {block}: {name} was made trainable, but the base is read only: call"
                    " poros.unstream(model) first, or train an adapter"
                )


class Block:
    """A layer whose calls are visits. Stands in for `layer.forward` on the instance.

    `micro_rows` rows of the batch pass through at a time in a differentiated call (None: all).
    """

    def __init__(
        self,
        index: int,
        layer: nn.Module,
        binding: Binding,
        stream: Stream,
        micro_rows: int | None = None,
    ) -> None:
        self.index, self.layer, self.binding, self.stream = index, layer, binding, stream
        self.micro_rows = micro_rows
        self.inner: Callable[..., Any] = layer.forward
        self.handles: list[Any] = []  # of the hooks that let state_dict() see the real tensors
        layout = stream.store.layouts[index]
        self._views = [layout.views(slot.buffer) for slot in stream.slots]

    @contextmanager
    def visit(self, phase: Phase) -> Iterator[None]:
        """Acquire the block's slot and point the layer's frozen tensors at it until the exit."""
        self.binding.check(self.index)
        slot = self.stream.acquire(self.index, phase)
        generation = slot.generation
        try:
            self.binding.point(self._views[slot.index])
            yield
        finally:
            self.binding.point(self.binding.placeholders)
            self.stream.release(slot, self.index, generation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward, as the model calls it."""
        # The recomputation is ours: the layer's own checkpointing would make it twice.
        if getattr(self.layer, "gradient_checkpointing", False):
            self.layer.__dict__["gradient_checkpointing"] = False
        if not torch.is_grad_enabled():
            with self.visit(Phase.INFERENCE):
                return self.inner(*args, **kwargs)
        call = _Call.of(self, args, kwargs)
        trainable = [p for p in self.layer.parameters() if p.requires_grad]
        if not any(tensor.requires_grad for tensor in [*call.tensors, *trainable]):
            with self.visit(Phase.FORWARD), torch.no_grad():
                return self.inner(*args, **kwargs)
        outputs: tuple[torch.Tensor, ...] = _Visit.apply(  # type: ignore[no-untyped-call]
            call, *call.tensors, *trainable
        )
        return call.pack(outputs)


class _Call:
    """One differentiated call of a block: its arguments as flat tensors, and its result's shape."""

    def __init__(self, block: Block, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        self.block = block
        self.leaves, self.spec = leaves, spec
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [leaves[i] for i in self.places]
        for place in self.places:
            leaves[place] = None  # held by autograd from here on, which watches for in-place writes
        self.rows = self._rows()
        self.output_leaves: list[Any] = []
        self.output_spec: pytree.TreeSpec | None = None

    @classmethod
    def of(cls, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_cache)
        for i, leaf in enumerate(leaves):
            if _is_cache(leaf):
                if leaf.get_seq_length() > 0:
                    raise ModelError(
                        "a key/value cache with content was passed while gradients are on; a"
                        " recomputation would append to it again: pass use_cache=False"
                    )
                leaves[i] = None  # an empty cache changes no number, and none is kept in training
            elif any(tensor.requires_grad for tensor in _hidden_tensors(leaf)):
                raise ModelError(
                    f"block {block.index} ({type(block.layer).__name__}) was passed a"
                    f" {type(leaf).__name__} that holds tensors with gradients, which cannot be"
                    " followed: this model cannot be streamed"
                )
        return cls(block, leaves, spec)

    def _rows(self) -> tuple[int, int]:
        """(rows of the batch, rows of a chunk); the hidden state is the first floating tensor."""
        hidden = next((t for t in self.tensors if t.is_floating_point() and t.dim() > 1), None)
        chunk = self.block.micro_rows
        if hidden is None or chunk is None or hidden.shape[0] <= chunk:
            return 0, 0
        batch, length = hidden.shape[0], hidden.shape[1]
        for tensor in self.tensors:
            if batch == length and tensor.dim() == 2 and tensor.shape[0] == batch:
                raise ModelError(
                    f"micro_rows: a {tuple(tensor.shape)} argument may hold rows of the batch or of"
                    " the sequence, which are as many: use another batch size"
                )
        return batch, chunk

    def chunks(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """`tensors` of the whole batch as one list a chunk; what has no batch rows goes whole."""
        batch, chunk = self.rows
        if not chunk:
            return [list(tensors)]
        parts = [
            tensor.split(chunk) if self._splits(tensor) else (tensor,) * -(-batch // chunk)
            for tensor in tensors
        ]
        return [list(row) for row in zip(*parts, strict=True)]

    def _splits(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[0] == self.rows[0]

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], pytree.TreeSpec]:
        """The layer on one chunk: flat outputs and their structure."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        versions = [tensor._version for tensor in tensors]
        outputs, spec = pytree.tree_flatten(self.block.inner(*args, **kwargs))
        name = f"block {self.block.index} ({type(self.block.layer).__name__})"
        if versions != [tensor._version for tensor in tensors]:
            raise ModelError(f"{name} writes into its input, so it cannot be recomputed")
        after, after_spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_cache)
        if after_spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise ModelError(f"{name} writes into a list or dict it is passed: not followed yet")
        for leaf in outputs:
            if _hidden_tensors(leaf):
                raise ModelError(f"{name} returns a {type(leaf).__name__}, which hides its tensors")
        return outputs, spec

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One output or gradient from its chunks."""
        if len(parts) == 1:
            return parts[0]
        if (
            parts[0].dim() < 1
            or parts[0].shape[0] % self.rows[1]
            or len({p.dim() for p in parts}) > 1
        ):
            raise ModelError(
                f"micro_rows: block {self.block.index} returns a {tuple(parts[0].shape)} tensor"
                " without batch rows: leave micro_rows out for this model"
            )
        return torch.cat(list(parts))

    def pack(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The block's result in its own structure."""
        given = iter(outputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.output_leaves]
        assert self.output_spec is not None
        return pytree.tree_unflatten(leaves, self.output_spec)


_TENSOR = object()


class _Visit(torch.autograd.Function):
    """A block's call. Inputs: the tensors of the call, then the block's trainable parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = inputs[: len(call.tensors)]
        call.tensors = []  # saved below: a second reference would keep them past their use
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.boundary = Boundary(call.block.stream.device)
        ctx.save_for_backward(*tensors)
        # Not saved with the tensors: hooks that offload saved tensors would hand back copies.
        ctx.trainable = inputs[len(tensors) :]
        ctx.versions = [parameter._version for parameter in ctx.trainable]
        with call.block.visit(Phase.FORWARD), no_cast_cache():
            runs = [call.run(chunk) for chunk in call.chunks(tensors)]
        leaves, call.output_spec = runs[0]
        flat = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        call.output_leaves = [_TENSOR if i in flat else leaf for i, leaf in enumerate(leaves)]
        outputs = tuple(call.join([run[0][i] for run in runs]) for i in flat)
        ctx.mark_non_differentiable(*[out for out in outputs if not out.is_floating_point()])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        tensors, trainable = ctx.saved_tensors, ctx.trainable
        if ctx.versions != [parameter._version for parameter in trainable]:
            raise StreamError(
                f"block {call.block.index}: an adapter was changed between forward and backward"
            )
        count = len(tensors)
        needs = ctx.needs_input_grad[1 : count + 1]
        sums: list[torch.Tensor | None] = [None] * len(trainable)
        parts: list[list[torch.Tensor | None]] = [[] for _ in range(count)]
        starts = [0] * len(gradients)
        with call.block.visit(Phase.BACKWARD), ctx.boundary.replay():
            for chunk in call.chunks(tensors):
                chunk = [
                    tensor.detach().requires_grad_(need)
                    for tensor, need in zip(chunk, needs, strict=True)
                ]
                leaves, _ = call.run(chunk)
                outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                roots, seeds = [], []
                for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                    if gradient is None or not output.requires_grad:
                        continue
                    roots.append(output)
                    if call.rows[1]:
                        seeds.append(gradient[starts[i] : starts[i] + output.shape[0]])
                        starts[i] += output.shape[0]
                    else:
                        seeds.append(gradient)
                wanted = [tensor for tensor in chunk if tensor.requires_grad]
                found: list[torch.Tensor | None] = [None] * (len(wanted) + len(trainable))
                if roots:
                    found = list(
                        torch.autograd.grad(roots, [*wanted, *trainable], seeds, allow_unused=True)
                    )
                given = iter(found)
                for place, tensor in enumerate(chunk):
                    parts[place].append(next(given) if tensor.requires_grad else None)
                sums = [_add(total, one) for total, one in zip(sums, given, strict=True)]
                del leaves, outputs, roots, seeds, found, given, chunk
        merged = [_merge(call, tensor, part) for tensor, part in zip(tensors, parts, strict=True)]
        return (None, *merged, *sums)


def _merge(
    call: _Call, tensor: torch.Tensor, parts: list[torch.Tensor | None]
) -> torch.Tensor | None:
    """The gradient of one argument from its chunks: rows joined, or summed if it went whole."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if call.rows[1] and call._splits(tensor):
        return call.join(present)
    total: torch.Tensor | None = None
    for part in present:
        total = _add(total, part)
    return total


def _add(total: torch.Tensor | None, one: torch.Tensor | None) -> torch.Tensor | None:
    # Out of place: autograd may return one tensor as the gradient of two inputs.
    return one if total is None else total if one is None else total + one


def _is_cache(leaf: Any) -> bool:
    return hasattr(leaf, "get_seq_length") and hasattr(leaf, "update")


def _hidden_tensors(leaf: Any) -> list[torch.Tensor]:
    """Tensors inside a leaf that is none itself: autograd cannot see them pass a block."""
    if isinstance(leaf, torch.Tensor | nn.Module):
        return []
    values = getattr(leaf, "__dict__", {}).values()
    return [value for value in values if isinstance(value, torch.Tensor)]
