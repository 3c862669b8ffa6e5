"""One decoder layer run in visits: the binding, the autograd function, the micro-row loop.

Each block is one `autograd.Function` whose inputs are every tensor of the call and the block's
trainable parameters. Its forward runs the layer without a graph; its backward recomputes with a
graph and differentiates it inside the same visit. The alternative, checkpointing with hooks that
move weights in and out, leaves the graph's lifetime to the framework: a graph kept one moment too
long reads another block's bytes without a word ([Note: visit] in `poros.core`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from poros.core.boundary import Boundary, no_cast_cache
from poros.core.schedule import Phase
from poros.core.stream import Stream
from poros.errors import ModelError, StreamError
from poros.frozen import Site


@dataclass
class Binding:
    """Points a block's frozen tensors at a slot, and between visits at placeholders.

    A placeholder has the tensor's shape and dtype over one element of all ones (NaN in floating
    point), so that a read outside a visit shows, and costs no memory.
    """

    sites: list[Site]
    placeholders: dict[str, torch.Tensor]

    def point(self, views: dict[str, torch.Tensor]) -> None:
        """Let every site read from `views`."""
        for site in self.sites:
            site.write(site.holder, site.key, views[site.name])

    def check(self) -> None:
        """Raise StreamError if a frozen parameter was replaced or made trainable meanwhile."""
        for site in self.sites:
            if site.parameter_of is None:
                continue
            (module, key), parameter = site.parameter_of, site.holder
            moved = parameter.data_ptr() != self.placeholders[site.name].data_ptr()
            if moved or parameter.requires_grad or module._parameters.get(key) is not parameter:
                raise StreamError(
                    f"{site.name} was replaced or made trainable, but the base that streams is"
                    " read only: call poros.unstream(model) before changing it"
                )

    def end(self) -> None:
        """Behind a visit: placeholders again, and each parameter the object that it was.

        PEFT's DoRA on a 4-bit base puts a new parameter over the same bytes in its place.
        """
        for site in self.sites:
            if site.parameter_of is not None:
                module, key = site.parameter_of
                now = module._parameters.get(key)
                if now is not site.holder and now is not None:
                    if now.data_ptr() == site.holder.data_ptr():
                        module._parameters[key] = site.holder
        self.point(self.placeholders)


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
        layout = stream.store.layouts[index]
        self._views = [layout.views(slot.buffer) for slot in stream.slots]

    def __str__(self) -> str:
        return f"block {self.index} ({type(self.layer).__name__})"

    def host_views(self) -> dict[str, torch.Tensor]:
        """The block's tensors in the store: on the CPU, to be read only."""
        return self.stream.store.layouts[self.index].views(self.stream.store.buffers[self.index])

    @contextmanager
    def visit(self, phase: Phase) -> Iterator[None]:
        """Acquire the block's slot and point the layer's frozen tensors at it until the exit."""
        self.binding.check()
        slot = self.stream.acquire(self.index, phase)
        generation = slot.generation
        try:
            self.binding.point(self._views[slot.index])
            yield
        finally:
            self.binding.end()
            self.stream.release(slot, self.index, generation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward, as the model calls it."""
        if not torch.is_grad_enabled():
            with self.visit(Phase.INFERENCE):
                return self.inner(*args, **kwargs)
        call = _Call(self, args, kwargs)
        trainable = [p for p in self.layer.parameters() if p.requires_grad]
        if not any(tensor.requires_grad for tensor in [*call.tensors, *trainable]):
            with self.visit(Phase.FORWARD):
                return self.inner(*args, **kwargs)
        return call.pack(_Visit.apply(call, *call.tensors, *trainable))  # type: ignore[no-untyped-call]


_TENSOR = object()  # stands for a tensor among the leaves of a call or of its result


class _Call:
    """One differentiated call of a block: its arguments as flat tensors, and its result's form."""

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_cache)
        self.tensors: list[torch.Tensor] = []
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self.tensors.append(leaf)
                self.leaves[i] = _TENSOR
            elif _is_cache(leaf):
                if leaf.get_seq_length(block.index) > 0:
                    raise ModelError(
                        "a key/value cache with content was passed while gradients are on; the"
                        " recomputation would append to it again: pass use_cache=False"
                    )
                self.leaves[i] = None  # empty, it changes no number, and training keeps none
            elif any(tensor.requires_grad for tensor in _hidden_tensors(leaf)):
                raise ModelError(f"{block} takes a {type(leaf).__name__}, which hides its tensors")
        self.batch = self.chunk = 0  # rows of the batch and of a chunk, if it is split
        hidden = next((t for t in self.tensors if t.is_floating_point() and t.dim() > 1), None)
        if hidden is not None and block.micro_rows and hidden.shape[0] > block.micro_rows:
            self.batch, self.chunk = hidden.shape[0], block.micro_rows
            if any(t.dim() == 2 and hidden.shape[1] == self.batch == len(t) for t in self.tensors):
                raise ModelError(
                    f"micro_rows: with {self.batch} rows of {self.batch} tokens it cannot be told"
                    " which arguments hold rows: use another batch size"
                )
        self.result: list[Any] = []
        self.result_spec: pytree.TreeSpec | None = None

    def splits(self, tensor: torch.Tensor) -> bool:
        """Whether an argument holds one row for each of the batch; others go whole."""
        return bool(self.chunk) and tensor.dim() > 1 and tensor.shape[0] == self.batch

    def chunks(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """`tensors` of the whole batch, once a chunk."""
        count = -(-self.batch // self.chunk) if self.chunk else 1
        parts = [t.split(self.chunk) if self.splits(t) else [t] * count for t in tensors]
        return [list(row) for row in zip(*parts, strict=True)]

    def run(self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], gate: str = "") -> _Run:
        """The layer on one chunk, with its graph from fresh inputs that need gradients as told.

        A backward that comes out of the graph at its inputs is an error with the text `gate`.
        """
        fresh = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        # What enters a block is no leaf in an ordinary graph, and autocast tells them apart.
        entering = iter(
            [_Gate.apply(t, gate) if t.requires_grad else t for t in fresh]  # type: ignore[no-untyped-call]
        )
        leaves = [next(entering) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        versions = [tensor._version for tensor in fresh]
        try:
            result = self.block.inner(*args, **kwargs)
        except RuntimeError as error:
            if "in-place" not in str(error) and "inplace" not in str(error):
                raise
            raise ModelError(f"{self.block} writes into its input: {error}") from error
        if versions != [tensor._version for tensor in fresh]:
            raise ModelError(f"{self.block} writes into its input, so it cannot be recomputed")
        after, after_spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_cache)
        if after_spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise ModelError(f"{self.block} writes into a list or dict it is passed: not followed")
        outputs, spec = pytree.tree_flatten(result)
        hiding = [type(leaf).__name__ for leaf in outputs if _hidden_tensors(leaf)]
        if hiding:
            raise ModelError(f"{self.block} returns a {hiding[0]}, which hides its tensors")
        return _Run(fresh, outputs, spec)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One output, or the gradient of one split argument, from its chunks."""
        if len(parts) > 1 and (parts[0].dim() == 0 or parts[0].shape[0] % self.chunk):
            raise ModelError(
                f"micro_rows: {self.block} returns a {tuple(parts[0].shape)} tensor without batch"
                " rows: leave micro_rows out for this model"
            )
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def pack(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The block's result in its own structure."""
        given = iter(outputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.result]
        assert self.result_spec is not None
        return pytree.tree_unflatten(leaves, self.result_spec)


@dataclass
class _Run:
    """The layer on one chunk: its fresh inputs, and its result as flat leaves of a structure."""

    inputs: list[torch.Tensor]
    leaves: list[Any]
    spec: pytree.TreeSpec

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class _Gate(torch.autograd.Function):
    """The way into a block's graph. A forward's graph is dropped, so nothing may come back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, closed: str) -> torch.Tensor:
        ctx.closed = closed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.closed:
            raise StreamError(ctx.closed)
        return gradient, None


class _Visit(torch.autograd.Function):
    """A block's call. Inputs: the tensors of the call, then the block's trainable parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors, ctx.trainable = inputs[: len(call.tensors)], inputs[len(call.tensors) :]
        call.tensors = []  # autograd keeps them from here on, and watches for in-place writes
        ctx.save_for_backward(*tensors)
        # Not saved with them: hooks that offload saved tensors would hand back copies.
        ctx.versions = [parameter._version for parameter in ctx.trainable]
        ctx.call, ctx.boundary = call, Boundary(call.block.stream.device)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[1 : 1 + len(tensors)]
        parts: list[list[torch.Tensor]] = []
        # With a graph, dropped at once: some kernels are chosen by whether gradients are needed.
        with call.block.visit(Phase.FORWARD), no_cast_cache(), torch.enable_grad():
            for chunk in call.chunks(tensors):
                run = call.run(
                    chunk,
                    needs,
                    f"{call.block}: a tensor from inside it (router logits, attentions?) takes part"
                    " in the loss, but its graph ended with the visit: leave it out of the loss, or"
                    " call poros.unstream(model)",
                )
                parts.append([output.detach() for output in run.outputs])
                fixed = [not output.requires_grad for output in run.outputs]
                call.result_spec = run.spec
                call.result = [_TENSOR if isinstance(x, torch.Tensor) else x for x in run.leaves]
                del run
        outputs = tuple(call.join(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*[out for out, f in zip(outputs, fixed, strict=True) if f])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, tensors, trainable = ctx.call, ctx.saved_tensors, ctx.trainable
        if ctx.versions != [parameter._version for parameter in trainable]:
            raise StreamError(f"{call.block}: an adapter changed between forward and backward")
        needs = ctx.needs_input_grad[1 : 1 + len(tensors)]
        parts: list[list[torch.Tensor | None]] = []
        sums: list[torch.Tensor | None] = [None] * len(trainable)
        starts = [0] * len(gradients)
        with call.block.visit(Phase.BACKWARD), ctx.boundary.replay():
            for chunk in call.chunks(tensors):
                with ctx.boundary.recompute():
                    run = call.run(chunk, needs)
                found = _differentiate(run, trainable, gradients, starts)
                del run
                parts.append(found[: len(tensors)])
                sums = [_add(*pair) for pair in zip(sums, found[len(tensors) :], strict=True)]
        merged: list[torch.Tensor | None] = []
        for tensor, part in zip(tensors, zip(*parts, strict=True), strict=True):
            rows = call.splits(tensor) and part[0] is not None
            merged.append(call.join(part) if rows else functools.reduce(_add, part))
        return (None, *merged, *sums)


def _differentiate(
    run: _Run,
    trainable: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    starts: list[int],
) -> list[torch.Tensor | None]:
    """Gradients of a chunk's inputs, then of the trainable parameters; frees the chunk's graph.

    `starts` holds the first row of this chunk in each of `gradients`, and moves on to the next.
    """
    roots, seeds = [], []
    for i, (output, gradient) in enumerate(zip(run.outputs, gradients, strict=True)):
        if gradient is not None and output.requires_grad:
            roots.append(output)
            whole = output.shape == gradient.shape
            seeds.append(gradient if whole else gradient[starts[i] : starts[i] + len(output)])
            starts[i] += 0 if whole else len(output)
    wanted = [tensor for tensor in [*run.inputs, *trainable] if tensor.requires_grad]
    found = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else ())
    return [next(found, None) if t.requires_grad else None for t in [*run.inputs, *trainable]]


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
