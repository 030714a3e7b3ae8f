"""Whose state is on which devices: it stays until another turn comes, and has left before that turn begins."""

from concurrent.futures import Future

from hypothesis import given, strategies as st

from rlinf_workers.errors import WorkersError
from rlinf_workers.execution.device_state import DeviceState
from rlinf_workers.execution.lease import LeaseRequest, Leases
from rlinf_workers.spans import LEASE, Span

DEVICES = {"rollout/0": {0}, "rollout/1": {1}, "actor/0": {0, 1}, "critic/0": {1}}


class Table:
    """Asks for room as the executor does; a worker that is sent away leaves when `leave` says so."""

    def __init__(self) -> None:
        self.device_state = DeviceState(self._send_away)
        self.leaving: dict[str, Future[Span]] = {}
        self.sent_away: list[str] = []
        self.answers: list[str] = []

    def _send_away(self, worker: str) -> Future[Span]:
        self.sent_away.append(worker)
        self.leaving[worker] = Future()
        return self.leaving[worker]

    def come(self, worker: str, *beside: str, stays: bool = False) -> list[str]:
        """What is answered at once."""
        self.answers.clear()
        groups = {worker.partition("/")[0], *beside}
        self.device_state.make_room(
            worker, DEVICES[worker], beside=groups, stays=stays, ready=lambda why: self.answers.append(why)
        )
        return list(self.answers)

    def leave(self, worker: str) -> list[str]:
        """What is answered then."""
        self.answers.clear()
        self.leaving.pop(worker).set_result(Span("offload", LEASE, 5, 7, 0, worker, ()))
        return list(self.answers)


def test_state_stays_until_somebody_else_comes_and_leaves_before_the_answer():
    table = Table()
    assert table.come("rollout/0") == table.come("rollout/0") == [""]
    assert table.sent_away == []
    assert table.come("actor/0") == []
    assert table.device_state.leaving() == table.sent_away == ["rollout/0"]
    assert table.device_state.take_spans() == []
    assert table.leave("rollout/0") == [""]
    assert table.device_state.leaving() == []
    assert [span.worker for span in table.device_state.take_spans()] == ["rollout/0"]
    assert table.device_state.take_spans() == []
    assert table.come("rollout/0") == [] and table.sent_away == ["rollout/0", "actor/0"]


def test_one_that_has_left_is_not_sent_away_again():
    table = Table()
    table.come("rollout/1")
    table.come("actor/0")
    table.leave("rollout/1")
    assert table.come("critic/0", "actor") == [""]
    assert table.sent_away == ["rollout/1"]


def test_other_devices_and_groups_of_the_turn_are_left_alone_and_so_is_who_stays():
    table = Table()
    assert table.come("rollout/0") == table.come("rollout/1") == [""], "another device"
    assert table.come("critic/0", "rollout") == [""], "the same turn"
    assert table.come("rollout/1", "critic", stays=True) == [""]
    assert table.come("actor/0") == []
    assert sorted(table.sent_away) == ["critic/0", "rollout/0"], "rollout/1 stays"
    assert table.leave("critic/0") == []
    assert table.leave("rollout/0") == [""], "when the last has left"


def test_two_who_wait_for_one_send_it_away_once():
    table = Table()
    table.come("actor/0")
    assert table.come("rollout/0") == table.come("rollout/1") == []
    assert table.sent_away == ["actor/0"]
    assert table.leave("actor/0") == ["", ""]


def test_who_comes_is_told_why_another_did_not_leave():
    table = Table()
    table.come("rollout/0")
    table.come("rollout/1")
    table.come("actor/0")
    table.answers.clear()
    table.leaving["rollout/1"].set_exception(WorkersError("out of host memory"))
    assert table.leave("rollout/0") == [
        "there is no room for actor/0: rollout/1 did not take its state off the devices: "
        "WorkersError: out of host memory"
    ]


def test_a_call_that_fails_at_once_is_an_answer_too():
    lost: Future[Span] = Future()
    lost.set_exception(WorkersError("rollout/0 was lost"))
    device_state, answers = DeviceState(lambda _: lost), []
    device_state.make_room("rollout/0", {0}, beside=(), stays=False, ready=answers.append)
    device_state.make_room("actor/0", {0}, beside=(), stays=False, ready=answers.append)
    assert answers[0] == "" and "rollout/0 was lost" in answers[1]


@given(
    devices=st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=4),
    num_chunks=st.integers(1, 3),
    choices=st.randoms(use_true_random=False),
)
def test_every_schedule_of_turns_ends_and_never_holds_two_states_on_one_device(devices, num_chunks, choices):
    """A worker a turn, in any interleaving of acquiring, releasing and leaving. Nobody is sent away within its turn, or
    for devices that no other turn has."""
    leaving: dict[int, Future[Span]] = {}
    there: set[int] = set()
    inside: set[int] = set()

    def send_away(worker: str) -> Future[Span]:
        turn = int(worker.partition("/")[2])
        assert turn in there and turn not in inside
        assert any(devices[turn] & devices[other] for other in range(len(devices)) if other != turn)
        leaving[turn] = Future()
        return leaving[turn]

    device_state = DeviceState(send_away)

    def make_room(worker: str, request: LeaseRequest, reply) -> None:
        on = devices[request.turn]
        device_state.make_room(worker, on, beside={worker.partition("/")[0]}, stays=False, ready=reply)

    leases = Leases({turn: frozenset(on) for turn, on in enumerate(devices)}, make_room)
    todo = {turn: num_chunks for turn in range(len(devices))}  # noqa: C420 - typed
    waiting: set[int] = set()

    def ask(action, turn: int) -> None:
        leases(f"{turn}/{turn}", LeaseRequest(action=action, turn=turn, stage="s", stays=False), lambda why: come(turn))

    def come(turn: int) -> None:
        waiting.discard(turn)
        inside.add(turn)
        there.add(turn)
        assert not any(devices[turn] & devices[other] for other in there if other != turn), "both are on one device"

    while todo or inside:
        moves = [("acquire", turn) for turn in sorted(todo.keys() - inside - waiting)]
        moves += [("release", turn) for turn in sorted(inside)] + [("leave", turn) for turn in sorted(leaving)]
        assert moves, f"stuck: {waiting} wait"
        action, turn = choices.choice(moves)
        if action == "acquire":
            waiting.add(turn)
            ask("acquire", turn)
        elif action == "release":
            inside.remove(turn)
            todo[turn] -= 1
            if not todo[turn]:
                del todo[turn]
            ask("release", turn)
        else:
            there.remove(turn)
            leaving.pop(turn).set_result(Span("offload", LEASE, 0, 1, 0, f"{turn}/{turn}", ()))
