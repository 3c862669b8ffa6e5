"""Where each tensor lies in its packed block: offset, dtype, shape, stride.

Every offset is a multiple of `ALIGN` bytes, so that a view has the alignment a fresh allocation
would have and kernels take the same path for both. Strides are kept, because a matmul with a
transposed operand may run another kernel than with a contiguous copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGN = 256


@dataclass(frozen=True)
class Entry:
    """One tensor of a packed block; `offset` and `nbytes` in bytes, `stride` in elements."""

    name: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The places of all frozen tensors of one block; `nbytes` is the size of the packed block."""

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of `tensors` in their order."""
        entries, offset = [], 0
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            entries.append(
                Entry(name, offset, nbytes, tensor.dtype, tuple(tensor.shape), _dense(tensor))
            )
            offset += -(-nbytes // ALIGN) * ALIGN
        return cls(tuple(entries), offset)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor as a view of `buffer`, a (>= nbytes,) uint8 tensor on any device."""
        return {
            entry.name: buffer[entry.offset : entry.offset + entry.nbytes]
            .view(entry.dtype)
            .as_strided(
                entry.shape,
                entry.stride,
                (buffer.storage_offset() + entry.offset) // entry.dtype.itemsize,
            )
            for entry in self.entries
        }


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if its elements fill one stretch of memory, else contiguous ones."""
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != covered:
            return torch.empty(tensor.shape, device="meta").stride()
        covered *= size
    return tensor.stride()
