"""What a block's forward leaves behind, so that its backward recomputes the same numbers.

The tensors of the call (the hidden state above all) are saved by the autograd function itself. Here
are the two states around it: the random number generators, for dropout, and autocast. Both are put
back as `torch.utils.checkpoint` does.

Autocast keeps the cast of a weight for its next use in the same context, and then adds the
gradients of both uses in the lower precision. A recomputation must do the same, but share no cast
with anything outside it: the forward, which has no graph, would leave casts that cut the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class Boundary:
    """Random and autocast state of `device` and the CPU at the start of a block's forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = _random_state(device)
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw the random numbers of the forward again; the present state is put back after."""
        present = _random_state(self._device)
        _set_random_state(self._device, self._random)
        try:
            yield
        finally:
            _set_random_state(self._device, present)

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Compute as the forward did, with gradients.

        Not around the differentiation, which belongs to the autocast state of the backward: the
        backward of bitsandbytes' matmul would be cast otherwise.
        """
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
                )
            stack.enter_context(torch.enable_grad())
            yield
        torch.clear_autocast_cache()


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Autocast as it is around, but neither reading nor leaving casts in its cache."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def _set_random_state(
    device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]
) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
