"""Each guard is broken on purpose, and something catches it: a tripwire, poison, or parity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_parity import adapter, configure, reference, rows, streaming

import poros
from poros.core import block as block_module
from poros.core.attach import streamed
from poros.core.block import Block
from poros.core.boundary import Boundary
from poros.core.stream import Slot, Stream
from poros.errors import ModelError, StreamError
from poros.loader import load

ADAPTER_TENSORS = 70


def step(model: PeftModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step under autocast, with the adapter's dropout."""
    ids = torch.tensor(rows(2, 24)["input_ids"])
    torch.manual_seed(11)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == ADAPTER_TENSORS
    return loss.detach(), found


def differences(model: PeftModel, expected: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> int:
    """How many gradients differ from the reference's; the loss counts as one more."""
    loss, found = step(model)
    unequal = [n for n in found if not torch.equal(found[n], expected[1][n])]
    return len(unequal) + (not torch.equal(loss, expected[0]))


@pytest.fixture(scope="module")
def expected(tiny_qwen2: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return step(reference(configure(tiny_qwen2)))


@pytest.fixture
def model(tiny_qwen2: Path) -> PeftModel:
    return streaming(configure(tiny_qwen2), 2)


def stream_of(model: PeftModel) -> Stream:
    state = streamed(model)
    assert state is not None
    return state.stream


def test_nothing_broken_differs_in_nothing(model: PeftModel, expected: Any) -> None:
    assert differences(model, expected) == 0


def test_random_state_not_restored(
    model: PeftModel, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.core.boundary._set_random_state", lambda *_: None)
    assert differences(model, expected) > ADAPTER_TENSORS // 2


def test_autocast_not_restored(
    model: PeftModel, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Boundary.__init__

    def forgetful(self: Boundary, device: torch.device) -> None:
        original(self, device)
        self._autocast = []

    monkeypatch.setattr(Boundary, "__init__", forgetful)
    assert differences(model, expected) > ADAPTER_TENSORS // 2


def test_a_forward_graph_kept_across_refills(
    tiny_qwen2: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classic fault: the loss stays exact, and the gradients come from other blocks' bytes."""

    def keeping(self: Block, *args: Any, **kwargs: Any) -> Any:
        with self.visit(block_module.Phase.FORWARD):
            return self.inner(*args, **kwargs)  # with its graph, used long after the visit

    monkeypatch.setattr(Block, "__call__", keeping)
    loss, found = step(streaming(configure(tiny_qwen2), 2))
    assert torch.equal(loss, expected[0]), "this fault does not show in the loss"
    wrong = [n for n in found if not torch.equal(found[n], expected[1][n])]
    assert len(wrong) > ADAPTER_TENSORS // 2
    # With poisoned slots the same fault cannot be overlooked.
    _, found = step(streaming(configure(tiny_qwen2), 2, poison=True))
    assert sum(bool(g.isnan().any()) for g in found.values()) > ADAPTER_TENSORS // 2


def test_two_slots_swapped(
    tiny_qwen2: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host believes the slot holds one block and the bytes are another's."""
    original = Stream.prefetch

    def crossed(self: Stream, block: int, slot: Slot) -> None:
        original(self, block ^ 1 if block < 4 else block, slot)
        slot.owner = block

    monkeypatch.setattr(Stream, "prefetch", crossed)
    assert differences(streaming(configure(tiny_qwen2), 2), expected) > ADAPTER_TENSORS // 2
    with pytest.raises(StreamError, match="not those of the store"):
        step(streaming(configure(tiny_qwen2), 2, poison=True))


def test_a_slot_refilled_too_early(model: PeftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stream.acquire

    def hasty(self: Stream, block: int, phase: Any) -> Slot:
        slot = original(self, block, phase)
        self.prefetch((block + 1) % 5, slot)  # while the block is read
        return slot

    monkeypatch.setattr(Stream, "acquire", hasty)
    with pytest.raises(StreamError, match="is being read as block 0"):
        step(model)


def test_a_slot_refilled_behind_the_tripwires_back(
    model: PeftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stream.acquire

    def stealthy(self: Stream, block: int, phase: Any) -> Slot:
        slot = original(self, block, phase)
        slot.reading = False
        self.prefetch((block + 3) % 5, slot)
        return slot

    monkeypatch.setattr(Stream, "acquire", stealthy)
    with pytest.raises(StreamError, match="its reader saw other bytes"):
        step(model)


def test_one_byte_flipped_in_a_packed_block(model: PeftModel, expected: Any) -> None:
    stream_of(model).store.buffers[3][7] ^= 0x10
    assert differences(model, expected) > 0


@pytest.mark.parametrize("part", ["absmax", "nested_absmax", "offset", "bias", "layernorm.weight"])
def test_every_kind_of_tensor_travels(model: PeftModel, expected: Any, part: str) -> None:
    """Were a kind left behind on the device, its bytes in the store would not matter."""
    store = stream_of(model).store
    entry = next(e for e in store.layouts[2].entries if e.name.endswith(part))
    view = store.layouts[2].views(store.buffers[2])[entry.name]
    view.copy_(view.flip(0) * 3 if view.dim() else view * 3)
    assert differences(model, expected) > 0


def test_the_four_bit_mark_decides_the_adapter_classes(tiny_qwen2: Path) -> None:
    """Without the mark PEFT silently takes its generic layer: same bytes, other numbers."""
    config = configure(tiny_qwen2)

    def kinds(model: PeftModel) -> list[str]:
        return [
            f"{type(m).__module__}.{type(m).__name__}"
            for m in model.modules()
            if hasattr(m, "adapter_layer_names")
        ]

    base = load(config.model, device="cpu")
    expected = kinds(reference(config))
    assert kinds(adapter(base, config)) == expected and len(expected) == 35
    assert set(expected) == {"peft.tuners.lora.bnb.Linear4bit"}
    base = load(config.model, device="cpu")
    base.is_loaded_in_4bit = False
    assert kinds(adapter(base, config)) != expected


def test_gradient_checkpointing_inside_a_block_is_kept_off(model: PeftModel, expected: Any) -> None:
    model.gradient_checkpointing_enable()
    before = stream_of(model).stats.visits
    assert differences(model, expected) == 0
    assert stream_of(model).stats.visits - before == 2 * 5


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_a_streamed_base_cannot_be_merged_copied_or_edited(
    tiny_qwen2: Path, quantization: str
) -> None:
    """Each of these would read or change weights that are not there."""
    config = configure(tiny_qwen2, quantization=quantization, lora_dropout=0.0)
    model = streaming(config, 2)
    resident = step(reference(config))
    for change in (model.merge_and_unload, model.merge_adapter, lambda: copy.deepcopy(model)):
        with pytest.raises(ModelError, match=r"streams: call poros\.unstream"):
            change()
    assert differences(model, resident) == 0
    norm = model.get_base_model().model.layers[1].input_layernorm.weight
    norm.data = torch.ones(64, dtype=norm.dtype)
    with pytest.raises(StreamError, match=r"input_layernorm\.weight was replaced"):
        step(model)


@pytest.mark.parametrize("quantization", ["nf4", "bf16"])
def test_dora_before_and_after_streaming(tiny_qwen2: Path, quantization: str) -> None:
    """DoRA reads the base's weights when it is made, and replaces 4-bit ones in its forward."""
    config = configure(tiny_qwen2, quantization=quantization)
    dora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)

    def base() -> Any:
        return load(config.model, quantization=quantization, device="cpu")

    def gradients(model: PeftModel) -> dict[str, torch.Tensor]:
        ids = torch.tensor(rows(2, 24)["input_ids"])
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(parameter.numel())
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data = (noise * 0.02).to(parameter.dtype)
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def added(model: PeftModel) -> PeftModel:
        torch.manual_seed(4)
        model.add_adapter("dora", dora)
        model.set_adapter("dora")
        return model

    torch.manual_seed(4)
    expected = gradients(get_peft_model(base(), dora))
    torch.manual_seed(4)
    early = gradients(poros.stream(get_peft_model(base(), dora), 2, device="cpu", poison=True))
    late = gradients(added(streaming(config, 2, poison=True)))
    late_expected = gradients(added(adapter(base(), config)))
    for one, two in ((expected, early), (late_expected, late)):
        assert len(one) == 5 * 2 * 3 and one.keys() == two.keys()
        assert [n for n in one if not torch.equal(one[n], two[n])] == []


def test_a_cache_does_not_matter_wherever_the_first_adapter_is(tiny_qwen2: Path) -> None:
    config = configure(tiny_qwen2)
    ids = torch.tensor(rows(2, 24)["input_ids"])
    found = []
    for model in (reference(config), streaming(config, 2)):
        for name, parameter in model.named_parameters():
            if ".layers.0." in name or ".layers.1." in name:
                parameter.requires_grad_(False)
        torch.manual_seed(1)
        model(input_ids=ids, labels=ids).loss.backward()  # use_cache is on by default
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(found[0]) == 3 * 14 and found[0].keys() == found[1].keys()
    assert [n for n in found[0] if not torch.equal(found[0][n], found[1][n])] == []


def test_a_loss_normalised_by_the_chunk_is_another_loss(expected: Any, tiny_qwen2: Path) -> None:
    """Rows of unlike length: the mean of the chunks' means is not the mean over all tokens."""
    model = streaming(configure(tiny_qwen2, lora_dropout=0.0), 2)
    ids = torch.tensor(rows(2, 24)["input_ids"])
    labels = ids.clone()
    labels[0, :20] = -100

    def gradients(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        loss_of(model(input_ids=ids, use_cache=False).logits[:, :-1].float()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def part(logits: torch.Tensor, wanted: torch.Tensor, how: str) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, wanted, reduction=how)

    wanted = labels[:, 1:]
    count = int((wanted != -100).sum())
    whole = gradients(lambda out: part(out.flatten(0, 1), wanted.flatten(), "sum") / count)
    by_count = gradients(lambda out: sum(part(out[i], wanted[i], "sum") for i in (0, 1)) / count)
    by_chunk = gradients(lambda out: sum(part(out[i], wanted[i], "mean") for i in (0, 1)) / 2)
    assert len(whole) == ADAPTER_TENSORS
    for a, b, c in zip(whole, by_count, by_chunk, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-6)
        assert not torch.allclose(a, c, rtol=0.1)
