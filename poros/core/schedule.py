"""Which block a freed slot is refilled with: Belady's rule over a known future. Pure logic.

Training walks the blocks as a zig-zag (0..L-1, then L-1..0), evaluation and generation as a cycle.
Both are periods of known order, so the best block to give up is always the one needed last
(L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).

The rule has one addition: the slot that is being read cannot be refilled, and a copy needs one
access of lead time to hide behind. So with two or more slots a block is never loaded into the slot
of the access just before it. Under that condition the loads are the fewest possible (a zig-zag over
L blocks with S slots loads 2(L-S)), and each is issued as early as that number allows.

The rejected alternative, a ring that always loads the next block into the slot just freed, loads
every block in every cycle and so gets nothing from spare slots during generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Phase(Enum):
    """Why a block is visited; it tells where in the order the visit stands."""

    FORWARD = "forward of a training step: the backward follows"
    BACKWARD = "backward of a training step"
    INFERENCE = "forward without gradients: the next forward follows"


class Schedule:
    """Refills for `num_slots` slots over `num_blocks` blocks.

    A wrong prediction (two forwards before a backward, a stop in the middle) costs a wait, never a
    wrong byte: the stream loads whatever is acquired.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_blocks, self.num_slots = num_blocks, num_slots
        up = list(range(num_blocks))
        self._zigzag = [*up, *reversed(up)]
        self._order = self._zigzag
        self.position = 0

    def visit(self, block: int, phase: Phase) -> None:
        """The access to `block` begins: the future is counted from here."""
        if phase is Phase.INFERENCE:
            self._order, self.position = self._zigzag[: self.num_blocks], block
        else:
            self._order = self._zigzag
            last = 2 * self.num_blocks - 1
            self.position = block if phase is Phase.FORWARD else last - block

    def leave(self) -> None:
        """The access is over: the next one is taken to follow the order."""
        self.position = (self.position + 1) % len(self._order)

    def needed(self, block: int, start: int) -> int:
        """Accesses from position `start` until `block` is needed; 0 if it is needed there."""
        period = len(self._order)
        distance = (block - start) % period
        if period > self.num_blocks:
            distance = min(distance, (period - 1 - block - start) % period)
        return distance

    def refill(self, held: Sequence[int | None]) -> tuple[int, int] | None:
        """The next load that should be issued now, as (slot, block), or None.

        `held[s]` is the block that slot `s` holds or is being filled with, None if it is empty. The
        block at the present position counts as being read. Call again after each load.
        """
        holding = set(held)
        if len(holding - {None}) >= self.num_blocks:
            return None
        period = len(self._order)
        reading = self._order[self.position]
        ahead = 0
        while self._order[(self.position + ahead) % period] in holding:
            ahead += 1
        wanted = self._order[(self.position + ahead) % period]
        if None in holding:
            return list(held).index(None), wanted

        # From the access after the one that wants the block: how long until each is needed again.
        after = self.position + ahead
        free = [
            (self.needed(block, after), slot)
            for slot, block in enumerate(held)
            if block is not None and (ahead == 0 or block != reading)
        ]
        # A block that is needed before the wanted one cannot make room for it.
        before = {self._order[(self.position + step) % period] for step in range(ahead)}
        free = [(distance, slot) for distance, slot in free if held[slot] not in before]
        later = [
            self.needed(self._order[(self.position + step) % period], after)
            for step in range(ahead - 1)
        ]
        if not free:
            return None
        distance, slot = max(free)
        if later and max(later) > distance:
            return None  # a block still to be read will be the better one to give up
        return slot, wanted
