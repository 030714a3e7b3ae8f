"""rlinf_comm.SharedPool against a model of it: any order of allocating, sending, taking and dropping."""

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_comm import Channel, PoolFull, SharedPool

CAPACITY = 64 * 40


class PoolMachine(RuleBasedStateMachine):
    """Each block is full of its own number, so that two on top of each other show."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SharedPool.create("model", capacity_bytes=CAPACITY)
        self.channel = Channel.create("model", capacity_bytes=1 << 16)
        self.tensors: list[tuple[torch.Tensor, int]] = []  # (tensor, number of its block)
        self.sent: list[int] = []  # number of the block
        self.sizes: list[int] = []  # bytes of each block that ever was

    def live(self) -> dict[int, int]:
        numbers = {number for _, number in self.tensors} | set(self.sent)
        return {number: self.sizes[number] for number in numbers}

    @rule(num_elements=st.integers(1, 250))
    def allocate(self, num_elements: int) -> None:
        num_bytes = -(-4 * num_elements // 64) * 64
        free = CAPACITY - sum(self.live().values())
        try:
            tensor = self.pool.empty(num_elements, torch.int32, timeout_s=0.0)
        except PoolFull:
            # Nothing moves in a pool, so that holes may be too small each; never, when nothing is in use.
            assert num_bytes > free or self.live()
            assert num_bytes > self.pool.stats().largest_hole_bytes
            return
        assert num_bytes <= free
        number = len(self.sizes)
        self.sizes.append(num_bytes)
        self.tensors.append((tensor.fill_(number), number))

    @precondition(lambda self: self.tensors)
    @rule(index=st.integers(0, 100))
    def view(self, index: int) -> None:
        tensor, number = self.tensors[index % len(self.tensors)]
        self.tensors.append((tensor[len(tensor) // 2 :], number))

    @precondition(lambda self: self.tensors)
    @rule(index=st.integers(0, 100))
    def send(self, index: int) -> None:
        tensor, number = self.tensors[index % len(self.tensors)]
        self.channel.put((tensor, number))
        self.sent.append(number)

    @precondition(lambda self: self.sent)
    @rule()
    def take(self) -> None:
        tensor, number = self.channel.take(timeout_s=0.0)[0].value
        assert number == self.sent.pop(0)
        self.tensors.append((tensor, number))

    @precondition(lambda self: self.tensors)
    @rule(index=st.integers(0, 100))
    def drop(self, index: int) -> None:
        del self.tensors[index % len(self.tensors)]

    @rule()
    def lose_the_channel(self) -> None:
        self.channel = Channel.create("model", capacity_bytes=1 << 16)
        self.sent.clear()

    @invariant()
    def nothing_is_overwritten(self) -> None:
        for tensor, number in self.tensors:
            assert bool((tensor == number).all())

    @invariant()
    def counts_agree(self) -> None:
        stats = self.pool.stats()
        assert stats.num_blocks == len(self.live())
        assert stats.used_bytes == sum(self.live().values())
        assert stats.num_holds == len({number for _, number in self.tensors}) + len(self.sent)
        assert stats.largest_hole_bytes <= stats.free_bytes

    def teardown(self) -> None:
        self.tensors.clear()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=30)
