"""Layouts, the store, the stream's tripwires, and what a block's call may take and return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from poros.core.attach import attach, detach, find_blocks, streamed
from poros.core.layout import ALIGN, Layout
from poros.core.schedule import Phase
from poros.core.store import PinnedStore
from poros.core.stream import Stream
from poros.errors import ModelError, StreamError

CPU = torch.device("cpu")
DTYPES = [
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        max_size=6,
    )
)
@settings(max_examples=80, deadline=None)
def test_a_packed_block_holds_the_same_bits(
    parts: list[tuple[torch.dtype, list[int], bool]],
) -> None:
    tensors = {}
    for i, (dtype, shape, transposed) in enumerate(parts):
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors[str(i)] = tensor.mT if transposed and tensor.dim() > 1 else tensor
    store = PinnedStore(CPU)
    layout = store.add(tensors)
    assert store.nbytes == layout.nbytes and layout.nbytes % ALIGN == 0
    views = layout.views(store.buffers[0])
    assert views.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor) and views[name].dtype == tensor.dtype
        if tensor.numel():
            assert views[name].stride() == tensor.stride()
            assert (views[name].data_ptr() - store.buffers[0].data_ptr()) % ALIGN == 0


def test_expanded_tensors_are_stored_whole() -> None:
    layout = Layout.of({"x": torch.ones(1, 3).expand(4, 3)})
    assert layout.entries[0].stride == (3, 1) and layout.entries[0].nbytes == 4 * 3 * 4


def stream(num_blocks: int, num_slots: int, **settings: Any) -> Stream:
    store = PinnedStore(CPU)
    for i in range(num_blocks):
        store.add({"x": torch.full((3,), float(i))})
    return Stream(store, num_slots, CPU, **settings)


def value(slot: Any, moving: Stream, block: int) -> float:
    return float(moving.store.layouts[block].views(slot.buffer)["x"][0])


def test_every_visit_sees_its_own_block() -> None:
    moving = stream(6, 2)
    addresses = [slot.buffer.data_ptr() for slot in moving.slots]
    for phase, order in ((Phase.FORWARD, range(6)), (Phase.BACKWARD, reversed(range(6)))):
        for block in order:
            slot = moving.acquire(block, phase)
            assert value(slot, moving, block) == block
            moving.release(slot, block, slot.generation)
    assert moving.stats.loads == 2 + 2 * (6 - 2) and moving.stats.late == 1
    assert addresses == [slot.buffer.data_ptr() for slot in moving.slots], "slots never move"


def test_a_slot_that_is_read_is_not_refilled() -> None:
    moving = stream(4, 2)
    slot = moving.acquire(0, Phase.FORWARD)
    with pytest.raises(StreamError, match="slot 0 is being read as block 0"):
        moving.prefetch(3, slot)
    with pytest.raises(StreamError, match="cannot be acquired"):
        moving.acquire(0, Phase.FORWARD)


def test_a_refill_during_a_visit_is_found_at_its_end() -> None:
    moving = stream(4, 2)
    slot = moving.acquire(0, Phase.FORWARD)
    generation, slot.reading = slot.generation, False
    moving.prefetch(3, slot)
    with pytest.raises(StreamError, match="its reader saw other bytes"):
        moving.release(slot, 0, generation)


def test_a_write_to_the_base_is_found() -> None:
    moving = stream(4, 2)
    slot = moving.acquire(0, Phase.FORWARD)
    moving.store.layouts[0].views(slot.buffer)["x"].add_(1)
    with pytest.raises(StreamError, match="was written to"):
        moving.release(slot, 0, slot.generation)


def test_poison_compares_the_bytes_and_leaves_none() -> None:
    moving = stream(4, 2, poison=True)
    slot = moving.acquire(0, Phase.FORWARD)
    view = moving.store.layouts[0].views(slot.buffer)["x"]
    held = view.clone()
    moving.release(slot, 0, slot.generation)
    assert not torch.equal(view, held)
    slot = moving.acquire(2, Phase.FORWARD)
    slot.buffer.data[0] = 77  # behind the version counter's back
    with pytest.raises(StreamError, match="not those of the store"):
        moving.release(slot, 2, slot.generation)


# -- toy models whose layers take and return unusual things ----------------------------------------


class Layer(nn.Module):
    """A checkpointable layer with a frozen weight, an int buffer, a bool mask and an adapter."""

    gradient_checkpointing = False

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.register_buffer("order", torch.randperm(width))
        self.register_buffer("mask", torch.rand(width) > 0.5)
        self.adapter = nn.Parameter(torch.randn(width, width) / 4)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return x + torch.tanh(x @ self.weight + x @ self.adapter)[..., self.order] * self.mask


class Toy(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        x = x * 1  # autocast treats leaves apart, and a hidden state is none
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


def gradients(model: nn.Module, *inputs: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    wanted = [*inputs, *(v for v in kwargs.values() if isinstance(v, torch.Tensor))]
    for tensor in wanted:
        tensor.grad = None
    model(*inputs, **kwargs).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    found += [t.grad for t in wanted if t.requires_grad]
    assert all(g is not None and bool(g.any()) for g in found)
    return [g.clone() for g in found if g is not None]


def assert_same(model: nn.Module, twin: nn.Module, *inputs: torch.Tensor, **kwargs: Any) -> None:
    one, two = gradients(model, *inputs, **kwargs), gradients(twin, *inputs, **kwargs)
    assert len(one) == len(two) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def pair(kind: type[nn.Module] = Layer, slots: int = 2, **settings: Any) -> tuple[nn.Module, Toy]:
    model = Toy(kind)
    attach(model, slots, device=CPU, poison=True, **settings)
    return model, Toy(kind)


def test_buffers_travel_and_come_back() -> None:
    model, twin = pair()
    assert_same(model, twin, torch.randn(3, 4, requires_grad=True))
    state = streamed(model)
    assert state is not None
    names = {entry.name for entry in state.store.layouts[0].entries}
    assert names == {"weight", "order", "mask"}
    assert model.layers[0].weight.isnan().all(), "outside a visit there are no bytes"
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(m.state_dict().values() for m in (model, twin)), strict=True)
    )
    detach(model)
    assert streamed(model) is None and "forward" not in model.layers[0].__dict__
    assert_same(model, twin, torch.randn(3, 4, requires_grad=True))
    with pytest.raises(ModelError, match="not streamed"):
        detach(model)


class Structured(Layer):
    """Takes a gradient through a nested argument; returns a dict with an index and a number."""

    def forward(self, x: torch.Tensor, extra: Any = None, **kwargs: Any) -> Any:
        y = super().forward(x) + extra["more"][0]
        return {"x": y, "top": y.argmax(-1), "name": "layer", "pair": (y * 2, None)}


class Nested(Toy):
    def __init__(self) -> None:
        super().__init__(Structured)

    def forward(self, x: torch.Tensor, extra: Any = None, **kwargs: Any) -> Any:
        for layer in self.layers:
            out = layer(x, extra={"more": [extra, 3]})
            assert out["name"] == "layer" and out["pair"][1] is None
            assert out["top"].dtype == torch.int64 and not out["top"].requires_grad
            x = out["x"] + out["pair"][0]
        return x


@pytest.mark.parametrize("micro_rows", [None, 2, 1])
def test_nested_arguments_and_results(micro_rows: int | None) -> None:
    model, twin = Nested(), Nested()
    attach(model, 2, device=CPU, micro_rows=micro_rows, poison=True)
    x, extra = torch.randn(3, 5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    if micro_rows is None:
        assert_same(model, twin, x, extra=extra)
    else:
        one, two = gradients(model, x, extra=extra), gradients(twin, x, extra=extra)
        assert len(one) == 4 + 2
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b)  # another order of the same sums
        assert torch.equal(
            model(x, extra=extra), torch.cat([twin(r, extra=extra) for r in x.split(micro_rows)])
        )


def test_micro_rows_refuse_what_they_cannot_split() -> None:
    model, _ = pair(micro_rows=2)
    with pytest.raises(ModelError, match="cannot be told which arguments hold rows"):
        model(torch.randn(3, 3, 4, requires_grad=True), mask=torch.zeros(3, 3))


class Summing(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x).sum()


def test_micro_rows_refuse_a_result_without_rows() -> None:
    model, _ = pair(Summing, micro_rows=2)
    with pytest.raises(ModelError, match="without batch rows"):
        model.layers[0](torch.randn(4, 3, 4, requires_grad=True))


class Writing(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x.add_(1))


class Remembering(Layer):
    def forward(self, x: torch.Tensor, memory: Any = None, **kwargs: Any) -> Any:
        memory["seen"] = x
        return super().forward(x)


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Boxing(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return Box(super().forward(x))


def test_what_would_cut_the_graph_is_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for kind, kwargs, message in (
        (Writing, {}, "writes into its input"),
        (Remembering, {"memory": {}}, "writes into a list or dict"),
        (Boxing, {}, "returns a Box, which hides its tensors"),
        (Layer, {"box": Box(x)}, "takes a Box, which hides its tensors"),
    ):
        model, _ = pair(kind)
        with pytest.raises(ModelError, match=message):
            model.layers[0](x * 1, **kwargs)
        # The slot was given back: the model still works.
        state = streamed(model)
        assert state is not None and not any(slot.reading for slot in state.stream.slots)


class Choosing(Layer):
    """Computes otherwise where no gradient is needed, as attention kernels do."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        y = super().forward(x)
        return y if torch.is_grad_enabled() and y.requires_grad else y * 1.5


def test_the_forward_runs_the_kernels_of_a_run_with_gradients() -> None:
    model, twin = pair(Choosing)
    assert_same(model, twin, torch.randn(3, 4))
    x = torch.randn(3, 4)
    assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))


def test_a_tensor_that_escapes_a_block_into_the_loss_is_refused() -> None:
    class Inside(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 2).requires_grad_(False)

        def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(x) * self.router(x).sum()

    model, _ = pair(Inside)
    seen: list[torch.Tensor] = []
    for layer in model.layers:
        layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
    loss = model(torch.randn(3, 4)).sum()
    assert len(seen) == 4
    loss.backward(retain_graph=True)  # only looked at, they do no harm
    with pytest.raises(StreamError, match=r"block 3 \(Inside\): a tensor from inside it"):
        (loss + seen[3].sum()).backward()


class Failing(Layer):
    fail = True

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        if Failing.fail:
            raise KeyError("of the model itself")
        return super().forward(x)


def test_an_error_in_a_layer_gives_the_slot_back() -> None:
    model, twin = pair(Failing)
    x = torch.randn(3, 4, requires_grad=True)
    Failing.fail = True
    with pytest.raises(KeyError):
        model(x)
    Failing.fail = False
    assert_same(model, twin, x)


def test_two_forwards_before_one_backward_and_a_graph_used_twice() -> None:
    model, twin = pair()
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    found = []
    for one in (model, twin):
        one.zero_grad()
        loss = one(x).sum() - one(y).square().sum()
        with torch.no_grad():
            one(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in one.parameters() if p.requires_grad])
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Twice(Layer):
    """Uses its adapter twice: under autocast both uses share one cast and add in bf16."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(x) + torch.tanh(x @ self.adapter.T)


@pytest.mark.parametrize("kind", [Layer, Twice])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_shares_casts_as_an_ordinary_graph_does(
    kind: type[nn.Module], inside: bool
) -> None:
    model, twin = pair(kind)
    found = []
    for one in (model, twin):
        x = torch.linspace(-1, 1, 12).view(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(x).square().sum()
            if inside:
                with torch.no_grad():  # leaves casts without a graph in this context
                    _ = [x @ layer.adapter for layer in one.layers]
                loss.backward()
        if not inside:
            loss.backward()
        found.append([p.grad for p in one.parameters() if p.requires_grad])
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Product(torch.autograd.Function):
    """A matmul whose backward is written in tensor operations, as that of bitsandbytes is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x.float() @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.matmul(gradient.float(), ctx.weight.T), None


class WrittenOut(Layer):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return Product.apply(super().forward(x), self.weight)


def test_the_differentiation_runs_in_the_autocast_state_of_the_backward() -> None:
    model, twin = pair(WrittenOut)
    found = []
    for one in (model, twin):
        x = torch.linspace(-1, 1, 12).view(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(x).square().sum()
        loss.backward()
        found.append([p.grad for p in one.parameters() if p.requires_grad])
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_backward_under_autocast_and_under_saved_tensor_hooks() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    model, twin = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model, twin, x)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    model, twin = pair()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same(model, twin, x)


def test_an_adapter_that_changes_between_forward_and_backward_is_refused() -> None:
    model, _ = pair()
    loss = model(torch.randn(3, 4)).sum()
    with torch.no_grad():
        model.layers[2].adapter.add_(1)
    with pytest.raises(StreamError, match="changed between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("change", ["trainable", "replaced"])
def test_a_base_that_changes_is_refused_by_name(change: str) -> None:
    model, _ = pair()
    if change == "trainable":
        model.layers[1].weight.requires_grad_(True)
    else:
        model.layers[1].weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    with pytest.raises(StreamError, match="weight was replaced"):
        model(torch.randn(3, 4))


def test_shared_tensors_stay_on_the_device() -> None:
    def build() -> Toy:
        model = Toy()
        model.layers[2].weight = model.layers[0].weight
        model.outside = model.layers[1].weight
        model.layers[3].again = model.layers[3].weight  # twice in one block: still streams
        return model

    model, twin = build(), build()
    state = attach(model, 2, device=CPU, poison=True)
    names = [{entry.name for entry in layout.entries} for layout in state.store.layouts]
    assert ["weight" in n for n in names] == [False, False, False, True]
    assert_same(model, twin, torch.randn(3, 4, requires_grad=True))


def test_blocks_of_other_sizes_share_the_slots() -> None:
    def build() -> Toy:
        model = Toy()
        model.layers[1].extra = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        return model

    model, twin = build(), build()
    state = attach(model, 2, device=CPU, poison=True)
    assert len({layout.nbytes for layout in state.store.layouts}) == 2
    assert {len(slot.buffer) for slot in state.stream.slots} == {state.store.layouts[1].nbytes}
    assert_same(model, twin, torch.randn(3, 4, requires_grad=True))


def test_blocks_below_the_first_adapter_keep_no_graph() -> None:
    model, twin = pair()
    for one in (model, twin):
        for layer in one.layers[:2]:
            layer.adapter.requires_grad_(False)
    assert_same(model, twin, torch.randn(3, 4))
    state = streamed(model)
    assert state is not None and state.stream.stats.visits == 4 + 2


def test_a_model_without_blocks_is_refused_by_name() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ModelError, match=r"no list of decoder layers.*parts \(1 x Linear\)"):
        find_blocks(model)
    model, _ = pair()
    with pytest.raises(ModelError, match="streamed already"):
        attach(model, 1, device=CPU)
