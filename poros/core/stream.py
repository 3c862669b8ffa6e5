"""The slots, the copy queue and the events: the only file that names a CUDA stream for weights.

Two orders are kept by events, and both are silent faults if they are not:
`slot.ready`, recorded behind the copy into the slot, is waited for by the compute before it reads;
`slot.free`, recorded behind the compute's last read, is waited for by the next copy into the slot.

On the CPU the same schedule runs over slots in ordinary memory with synchronous copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from poros.core.schedule import Phase, Schedule
from poros.core.store import PinnedStore
from poros.errors import StreamError


@dataclass
class Slot:
    """One preallocated device buffer at a fixed address and what it holds.

    `generation` counts the refills, so that a lease can tell whether its bytes were replaced.
    """

    index: int
    buffer: torch.Tensor  # (slot bytes,) uint8
    owner: int | None = None
    generation: int = 0
    reading: bool = False
    written: int = 0  # the buffer's version behind its last refill: more means someone wrote to it
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None


@dataclass
class Stats:
    """Counters since the stream was made; `late` are acquires whose block was not under way."""

    visits: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    late: int = 0


@dataclass
class Stream:
    """Moves packed blocks from `store` through `num_slots` slots on `device`.

    With `poison`, each slot is filled with 0xFF behind every release (NaN in bf16 and fp32), so
    that any use outside a visit shows, and its bytes are compared with the store before that.
    """

    store: PinnedStore
    num_slots: int
    device: torch.device
    poison: bool = False
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        size = max((layout.nbytes for layout in self.store.layouts), default=0)
        self.schedule = Schedule(len(self.store.layouts), self.num_slots)
        self.slots = [
            Slot(index, torch.empty(size, dtype=torch.uint8, device=self.device))
            for index in range(self.num_slots)
        ]
        self._copies: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            # Copies queue here and overlap with the compute of the blocks before.
            self._copies = torch.cuda.Stream(self.device)
            for slot in self.slots:
                slot.ready, slot.free = torch.cuda.Event(), torch.cuda.Event()
                # The allocator may hand out memory that queued work still uses, and must not hand
                # this out again before the last copy into it has ended.
                slot.free.record(torch.cuda.current_stream(self.device))
                slot.buffer.record_stream(self._copies)

    def prefetch(self, block: int, slot: Slot) -> None:
        """Queue the copy of `block` into `slot`, behind the slot's last reader.

        Raises:
            StreamError: the slot is being read.
        """
        if slot.reading:
            raise StreamError(
                f"slot {slot.index} is being read as block {slot.owner}"
                f" (generation {slot.generation}) and cannot take block {block}"
            )
        source = self.store.buffers[block]
        target = slot.buffer[: len(source)]
        if self._copies is None:
            target.copy_(source)
        else:
            assert slot.free is not None and slot.ready is not None
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(slot.free)
                target.copy_(source, non_blocking=True)
                slot.ready.record(self._copies)
        slot.owner = block
        slot.generation += 1
        slot.written = slot.buffer._version
        self.stats.loads += 1
        self.stats.loaded_bytes += len(source)

    def acquire(self, block: int, phase: Phase) -> Slot:
        """The slot that holds `block`, once the current stream has waited for its bytes.

        Raises:
            StreamError: the slot holds another block, or the block is being read already.
        """
        self.schedule.visit(block, phase)
        self.stats.visits += 1
        slot = self._holding(block)
        if slot is None:
            self.stats.late += 1
            self._refill()
            slot = self._holding(block)
        if slot is None or slot.reading:
            raise StreamError(
                f"block {block} cannot be acquired: slots hold"
                f" {[(s.owner, s.generation, 'read' if s.reading else 'free') for s in self.slots]}"
            )
        if slot.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.ready)
        slot.reading = True
        self._refill()
        return slot

    def release(self, slot: Slot, block: int, generation: int) -> None:
        """The reads of `block` are queued: the slot may be refilled behind them.

        Raises:
            StreamError: the slot was refilled or written to during the visit.
        """
        slot.reading = False
        if slot.owner != block or slot.generation != generation:
            raise StreamError(
                f"slot {slot.index} was acquired as block {block} generation {generation} and holds"
                f" block {slot.owner} generation {slot.generation}: its reader saw other bytes"
            )
        if slot.buffer._version != slot.written:
            raise StreamError(
                f"block {block}: a frozen tensor was written to in slot {slot.index}; the base is"
                " read only, so the change would be lost"
            )
        if self.poison:
            source = self.store.buffers[block]
            if not torch.equal(slot.buffer[: len(source)].cpu(), source):
                raise StreamError(
                    f"block {block}: the bytes in slot {slot.index} (generation {generation}) are"
                    " not those of the store"
                )
            slot.buffer.fill_(0xFF)
            slot.owner = None
        if slot.free is not None:
            slot.free.record(torch.cuda.current_stream(self.device))
        self.schedule.leave()
        self._refill()

    def _holding(self, block: int) -> Slot | None:
        return next((slot for slot in self.slots if slot.owner == block), None)

    def _refill(self) -> None:
        while load := self.schedule.refill([slot.owner for slot in self.slots]):
            index, block = load
            self.prefetch(block, self.slots[index])
