"""Holder of all packed blocks in host memory that the device can read directly.

torch's pinned allocator rounds every request up to a power of two, which can double the host memory
of a model. So the memory comes from anonymous mappings, page-aligned and exactly as large as the
packed block, and is registered with the driver. Where registering is refused (containers and WSL2
limit page-locked memory), the blocks stay ordinary memory: copies then run at the pageable rate,
and `pinned_bytes` and `reason` say so.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Mapping

import torch

from poros.core.layout import Layout


class PinnedStore:
    """Packed blocks in RAM, one exactly sized buffer each, page-locked for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._registered: list[int] = []
        self.layouts: list[Layout] = []
        self.buffers: list[torch.Tensor] = []  # (layout.nbytes,) uint8 each
        self.pinned_bytes = 0
        self.reason = "page-locked" if self._pin else "ordinary memory: the device is the CPU"
        weakref.finalize(self, _unregister, self._registered)

    @property
    def nbytes(self) -> int:
        """Size of all packed blocks in bytes."""
        return sum(layout.nbytes for layout in self.layouts)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Pack copies of `tensors` (any device) as the next block and return its layout."""
        layout = Layout.of(tensors)
        buffer = torch.frombuffer(
            mmap.mmap(-1, max(layout.nbytes, mmap.PAGESIZE)), dtype=torch.uint8
        )[: layout.nbytes]
        for name, view in layout.views(buffer).items():
            view.copy_(tensors[name])
        self.layouts.append(layout)
        self.buffers.append(buffer)
        self._register(buffer)
        return layout

    def _register(self, buffer: torch.Tensor) -> None:
        if not self._pin or not len(buffer):
            return
        cudart = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
        if error == 0:
            self._registered.append(buffer.data_ptr())
            self.pinned_bytes += len(buffer)
            return
        # A refused page-lock leaves an error that the next launch would report as its own.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        self._pin = False
        self.reason = (
            f"ordinary memory after {self.pinned_bytes} page-locked bytes (cudaHostRegister: error"
            f" {error}): copies from it are several times slower; WSL2 and containers limit"
            " page-locked memory"
        )


def _unregister(addresses: list[int]) -> None:
    if addresses:
        torch.cuda.synchronize()  # a prefetch may still be reading
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
    addresses.clear()
