"""What only a CUDA device can show: races, page-locked memory, the load, the driver's errors."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_core import Layer, Toy, gradients
from test_parity import adapter, compare, configure, reference, rows, streaming, train
from torch import nn

import poros
from poros.core.attach import attach, streamed
from poros.core.stream import Slot, Stream
from poros.errors import PorosOOMError
from poros.loader import load

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
CYCLES = 20_000_000  # some ten milliseconds


class Blind:
    """An event that is neither recorded nor waited for."""

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass


class Late(Layer):
    """Reads its weights long after the visit began."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        torch.cuda._sleep(CYCLES)
        return super().forward(x, **kwargs)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stream.prefetch

    def late(self: Stream, block: int, slot: Slot) -> None:
        with torch.cuda.stream(self._copies):
            torch.cuda._sleep(CYCLES)
        original(self, block, slot)

    monkeypatch.setattr(Stream, "prefetch", late)


def on_cuda(kind: type[nn.Module], drop: str | None = None) -> bool:
    """Whether a streamed toy has the gradients of its resident twin, with one event dropped."""
    model = Toy(kind, count=6)
    state = attach(model, 2, device=CUDA)
    for slot in state.stream.slots if drop else ():
        setattr(slot, drop, Blind())
    x = torch.linspace(-1, 1, 64, device=CUDA).view(16, 4).requires_grad_()
    ours = gradients(model, x)
    torch.cuda.synchronize()
    theirs = gradients(Toy(kind, count=6).to(CUDA), x)
    assert len(ours) == len(theirs) == 7
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_late_copies_are_waited_for(slow_copies: None) -> None:
    assert on_cuda(Layer)


def test_without_the_ready_wait_late_copies_are_missed(slow_copies: None) -> None:
    assert not on_cuda(Layer, drop="ready")


def test_late_readers_are_waited_for() -> None:
    assert on_cuda(Late)


def test_without_the_free_wait_late_readers_are_overtaken() -> None:
    assert not on_cuda(Late, drop="free")


def test_host_memory_is_page_locked_exactly_and_let_go() -> None:
    model = Toy(count=6)
    state = attach(model, 2, device=CUDA)
    store = state.store
    assert store.reason == "page-locked" and store.pinned_bytes == store.nbytes > 0
    assert all(buffer.is_pinned() for buffer in store.buffers)
    kept = store.buffers[0]
    del model, state, store
    gc.collect()
    assert not kept.is_pinned()
    torch.zeros(1, device=CUDA).sum().item()  # no stale error is left behind


def test_a_refused_page_lock_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: Any) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    model = Toy(count=6)
    state = attach(model, 2, device=CUDA)
    assert state.store.pinned_bytes == 0 and "ordinary memory" in state.store.reason
    x = torch.linspace(-1, 1, 64, device=CUDA).view(16, 4).requires_grad_()
    ours, theirs = gradients(model, x), gradients(Toy(count=6).to(CUDA), x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_load_keeps_the_base_off_the_device(tiny_qwen2: Path) -> None:
    config = configure(tiny_qwen2, device="cuda")
    resident = reference(config).get_base_model()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    base = load(str(tiny_qwen2), device="cuda")
    largest = max(p.numel() for p in resident.parameters()) * 4
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 4 * largest
    model = adapter(base, config)
    assert {p.device.type for p in base.parameters()} == {"cpu"}
    one, two = resident.state_dict(), model.get_base_model().state_dict()
    assert one.keys() == two.keys()
    frozen = [name for name in one if "lora_" not in name]
    assert len(frozen) > 200
    assert [name for name in frozen if not torch.equal(one[name].cpu(), two[name])] == []


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_trainer_on_cuda(
    tiny_qwen2: Path, quantization: str, slots: int, tmp_path: Path
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        config = configure(tiny_qwen2, quantization=quantization, device="cuda")
        expected = train(reference(config), config, tmp_path)
        model = streaming(config, slots, poison=slots < 5)
        compare(expected, train(model, config, tmp_path), num_tensors=70)
    finally:
        torch.use_deterministic_algorithms(False)
    state = streamed(model)
    assert state is not None and state.store.reason == "page-locked"


def test_a_card_without_bf16_trains_in_fp16(
    tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss scaling needs float32 adapters, where TRL makes those of a 4-bit base bf16."""
    monkeypatch.setattr(
        "poros.trainer.compute_dtype", lambda _: (torch.float16, "as on such a card")
    )
    config = configure(tiny_qwen2, device="cuda", steps=16)
    torch.use_deterministic_algorithms(True)
    try:
        one = train(reference(config), config, tmp_path)
        model = streaming(config, 2, poison=True)
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        two = train(model, config, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    # Steps whose scaled gradients overflow are left out, and tell nothing: their norms are NaN.
    assert len(one.losses) == 16 and one.losses == two.losses
    assert one.weights.keys() == two.weights.keys() == before.keys() and len(before) == 70
    for name, weight in two.weights.items():
        assert weight.dtype == torch.float32 and weight.isfinite().all()
        assert torch.equal(weight, one.weights[name]) and not torch.equal(weight, before[name])


def test_generation_and_evaluation(tiny_qwen2: Path) -> None:
    config = configure(tiny_qwen2, device="cuda")
    resident, model = reference(config).eval(), streaming(config, 2, poison=True).eval()
    ids = torch.tensor(rows(2, 12)["input_ids"], device=CUDA)
    with torch.inference_mode():
        assert torch.equal(resident(ids).logits, model(ids).logits)
        one, two = (m.generate(ids, max_new_tokens=8, do_sample=False) for m in (resident, model))
    assert torch.equal(one, two) and one.shape[1] > 12
    poros.unstream(model)
    with torch.inference_mode():
        assert torch.equal(resident(ids).logits, model(ids).logits)


class Wide(Layer):
    def __init__(self) -> None:
        super().__init__(2048)


def test_a_model_that_does_not_fit_is_an_error_with_sizes() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    limit = torch.cuda.memory_reserved() + 40 * 2**20  # adapters of 16 MiB each, and slots
    torch.cuda.set_per_process_memory_fraction(limit / total, device=0)
    try:
        with pytest.raises(PorosOOMError, match=r"(?s)free on the card.*next: halve block_size"):
            poros.stream(Toy(Wide), 4)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device=0)
