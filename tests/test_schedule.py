"""The schedule against a brute-force optimum, and its counts for whole steps."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from poros.core.schedule import Phase, Schedule


class Slots:
    """The stream's bookkeeping without bytes: who holds what, and how many loads it took."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.schedule = Schedule(num_blocks, num_slots)
        self.held: list[int | None] = [None] * num_slots
        self.loads = 0
        self.late = 0

    def access(self, block: int, phase: Phase) -> None:
        self.schedule.visit(block, phase)
        if block not in self.held:
            self.late += 1
        self.refill(reading=None if block not in self.held else block)
        assert block in self.held
        self.refill(reading=block)
        self.schedule.leave()
        self.refill(reading=None)

    def refill(self, reading: int | None) -> None:
        while load := self.schedule.refill(self.held):
            slot, block = load
            assert self.held[slot] is None or self.held[slot] != reading, "refilled while read"
            assert block not in self.held
            self.held[slot] = block
            self.loads += 1

    def train(self, num_blocks: int) -> int:
        before = self.loads
        for block in range(num_blocks):
            self.access(block, Phase.FORWARD)
        for block in reversed(range(num_blocks)):
            self.access(block, Phase.BACKWARD)
        return self.loads - before

    def infer(self, num_blocks: int) -> int:
        before = self.loads
        for block in range(num_blocks):
            self.access(block, Phase.INFERENCE)
        return self.loads - before


def fewest_loads(order: list[int], num_blocks: int, num_slots: int) -> int:
    """Fewest loads in 60 periods of `order`, once settled, by dynamic programming over states.

    The slot being read is never refilled, and with two slots or more a block arrives before the
    access in front of it ends; so the state at an access holds the block read and the one before.
    """
    states = [frozenset(s) for s in itertools.combinations(range(num_blocks), num_slots)]
    keep = 2 if num_slots > 1 else 1
    best = {state: 0 for state in states}
    marks = []
    for period in range(72):
        for t in range(len(order)):
            must = {order[t], order[t - 1]} if keep == 2 else {order[t]}
            if period == 0 and t == 0:
                must = {order[t]}
            best = {
                new: min(cost + len(new - old) for old, cost in best.items())
                for new in states
                if must <= new
            }
        marks.append(min(best.values()))
    return marks[71] - marks[11]


@given(st.integers(2, 6), st.data())
@settings(max_examples=40, deadline=None)
def test_loads_are_the_fewest_possible(num_blocks: int, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, num_blocks))
    train = data.draw(st.booleans())
    slots = Slots(num_blocks, num_slots)
    step = slots.train if train else slots.infer
    for _ in range(12):
        step(num_blocks)
    loads = sum(step(num_blocks) for _ in range(60))
    up = list(range(num_blocks))
    order = [*up, *reversed(up)] if train else up
    assert loads == fewest_loads(order, num_blocks, num_slots)
    if train:
        assert loads == 60 * 2 * (num_blocks - num_slots)


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_zigzag_step_loads_twice_what_does_not_fit(num_blocks: int, num_slots: int) -> None:
    num_slots = min(num_slots, num_blocks)
    slots = Slots(num_blocks, num_slots)
    slots.train(num_blocks)
    assert slots.train(num_blocks) == 2 * (num_blocks - num_slots)
    if num_slots > 1:
        late = slots.late
        slots.train(num_blocks)
        assert slots.late == late, "with two slots every copy has an access to hide behind"


@given(
    st.integers(2, 8),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(Phase))),
)
@settings(max_examples=100, deadline=None)
def test_any_order_of_visits_is_served(
    num_blocks: int, num_slots: int, visits: list[tuple[int, Phase]]
) -> None:
    slots = Slots(num_blocks, min(num_slots, num_blocks))
    for block, phase in visits:
        slots.access(block % num_blocks, phase)
    held = [block for block in slots.held if block is not None]
    assert len(held) == len(set(held))


def test_two_forwards_before_one_backward_cost_waits_only() -> None:
    slots = Slots(6, 3)
    slots.train(6)
    for _ in range(2):
        for block in range(6):
            slots.access(block, Phase.FORWARD)
    for _ in range(2):
        for block in reversed(range(6)):
            slots.access(block, Phase.BACKWARD)
    assert slots.train(6) <= 2 * 6
    assert slots.train(6) == 2 * (6 - 3)
