"""Leases: exclusion, gang semantics, order, and that every schedule of requests comes to an end."""

import pytest
from hypothesis import given, strategies as st

from rlinf_workers.execution.lease import LeaseRequest, Leases


class Table:
    """Asks for leases as workers do."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self._granted: list[tuple[int, str]] = []

    def _ask(self, action, turn: int, holder: str) -> list[tuple[int, str]]:
        worker, _, stage = holder.partition(" ")
        request = LeaseRequest(action=action, turn=turn, stage=stage, stays=False)
        self.leases(worker, request, lambda _: self._granted.append((turn, holder)))
        granted, self._granted = self._granted, []
        return granted

    def acquire(self, turn: int, holder: str) -> bool:
        """Whether it is granted at once."""
        return self._ask("acquire", turn, holder) == [(turn, holder)]

    def release(self, turn: int, holder: str) -> list[tuple[int, str]]:
        """Who gets in."""
        return self._ask("release", turn, holder)


def table(*devices: set[int]) -> Table:
    return Table(Leases({turn: frozenset(on) for turn, on in enumerate(devices)}))


def test_turns_on_one_device_exclude_each_other():
    leases = table({0}, {0})
    assert leases.acquire(0, "a")
    assert not leases.acquire(1, "b")
    assert leases.release(0, "a") == [(1, "b")]


def test_a_run_that_is_given_up_refuses_whoever_waits_or_comes():
    leases, answers = Leases({0: frozenset({0}), 1: frozenset({0})}), []

    def ask(action, turn: int, worker: str) -> None:
        leases(worker, LeaseRequest(action=action, turn=turn, stage="s", stays=False), lambda why: answers.append(why))

    ask("acquire", 0, "a/0")
    ask("acquire", 1, "b/0")
    assert answers == [""]
    leases.refuse("given up")
    assert answers == ["", "given up"]
    ask("acquire", 0, "a/1")
    ask("release", 0, "a/0")
    assert answers == ["", "given up", "given up"]


def test_turns_on_different_devices_run_at_once():
    leases = table({0}, {1})
    assert leases.acquire(0, "a")
    assert leases.acquire(1, "b")


def test_ranks_of_a_turn_share_it():
    leases = table({0, 1}, {0, 1})
    assert leases.acquire(0, "a/0")
    assert not leases.acquire(1, "b/0")
    assert leases.acquire(0, "a/1"), "a rank that has not had its go joins, or a collective of a could never end"
    assert leases.release(0, "a/0") == []
    assert leases.release(0, "a/1") == [(1, "b/0")]


def test_a_rank_that_had_its_go_waits_for_others():
    leases = table({0}, {0})
    leases.acquire(0, "env/0")
    leases.acquire(0, "policy/0")
    leases.acquire(1, "actor/0")
    leases.release(0, "env/0")
    assert not leases.acquire(0, "env/0")
    assert leases.release(0, "policy/0") == [(0, "env/0")], "the turn earlier in the flow goes first"
    assert leases.release(0, "env/0") == [(1, "actor/0")]


def test_a_rank_comes_back_while_a_rank_of_its_group_is_inside():
    leases = table({0, 1}, {0, 1})
    leases.acquire(0, "a/0")
    leases.acquire(0, "a/1")
    leases.acquire(1, "b/0")
    leases.release(0, "a/1")
    assert leases.acquire(0, "a/1"), "a/0 may be waiting for it in a collective"


def test_the_earlier_turn_goes_first():
    leases = table({0}, {0}, {0})
    leases.acquire(1, "b")
    leases.acquire(2, "c")
    leases.acquire(0, "a")
    assert leases.release(1, "b") == [(0, "a")]


def test_giving_back_what_one_does_not_hold_is_an_error():
    leases = table({0}, {0})
    with pytest.raises(ValueError, match="turn 0, which it does not hold"):
        leases.release(0, "a")


def test_holders_name_who_is_in_the_way():
    leases = table({0}, {0})
    leases.acquire(0, "rollout/0 rollout")
    leases.acquire(1, "actor/0 actor")
    assert leases.leases.holders(1) == ["rollout/0 rollout"]


@given(
    devices=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=4),
    num_ranks=st.integers(1, 3),
    num_chunks=st.integers(1, 3),
    choices=st.randoms(use_true_random=False),
)
def test_every_schedule_ends_and_never_shares_a_device(devices, num_ranks, num_chunks, choices):
    """Any interleaving of ranks that acquire, compute and release drains, and conflicting turns never overlap."""
    leases = table(*devices)
    todo = {(turn, f"{turn}/{rank}"): num_chunks for turn in range(len(devices)) for rank in range(num_ranks)}
    inside: set[tuple[int, str]] = set()
    waiting: set[tuple[int, str]] = set()
    while todo or inside:
        idle = [key for key in todo if key not in inside and key not in waiting]
        moves = [("acquire", key) for key in sorted(idle)] + [("release", key) for key in sorted(inside)]
        assert moves, f"stuck: {waiting} wait and nobody is inside"
        action, key = choices.choice(moves)
        if action == "acquire":
            (inside if leases.acquire(*key) else waiting).add(key)
        else:
            inside.remove(key)
            todo[key] -= 1
            if not todo[key]:
                del todo[key]
            for granted in leases.release(*key):
                waiting.remove(granted)
                inside.add(granted)
        turns = {turn for turn, _ in inside}
        assert all(not (devices[a] & devices[b]) for a in turns for b in turns if a != b)
    assert not any(leases.leases.holders(turn) for turn in range(len(devices)))
