"""Formats a diagnosis as one screen: the root cause and what to do first, then the graph, then the root causes'
stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rlinf_workers.control_characters import printable
from rlinf_workers.explaining.explanation import Look, RunExplanation
from rlinf_workers.explaining.graph import SETTLED_S, Cause, RootCause, WaitNode
from rlinf_workers.explaining.snapshot import Snapshot
from rlinf_workers.explaining.stacks import Frame, Stacks, ThreadStack

NUM_CULPRITS = 3
TIMES_EXPECTED = 3.0
"""A step that takes longer than this multiple of the expected time is late; the watch of a run uses the same factor."""
NUM_NODES = 12
NUM_INNER, NUM_OUTER = 6, 4
"""Frames shown: the innermost ones, and the stage at the outer end."""
STARTS = (
    ("run_stage", "execution/worker_host.py"),
    ("call", "execution/worker_host.py"),
    ("_run", "launchers/child.py"),
    ("run", "/threading.py"),
    ("_bootstrap_inner", "/threading.py"),
)
"""Functions, and suffixes of their files, at the start of every thread's stack."""
WHAT_TO_DO: Mapping[Cause, str] = {
    "gone": "read the end of its log; rlinf train --resume goes on from the last checkpoint",
    "stopped": "kill -CONT {pid} lets it go on; somebody sent it SIGSTOP, or a debugger holds it",
    "mismatch": "let all ranks make the same collectives in the same order: look for a branch that depends on the rank "
    "or on its items",
    "deadlock": "let one of them move first: put before it reads, or read before it fills the channel",
    "nobody left": "whoever should have put it, closed it or published it has returned: look at what it did last",
    "busy": "look at its stack: code of yours (a reward, an environment, a model) that takes too long or waits without "
    "end",
}


def explanation_text(explanation: RunExplanation, *, every: bool = False) -> str:
    """The formatted lines, without the run's name.

    Args:
        every: include all nodes and all processes, however long the text gets.
    """
    lines = [*_head(explanation), *graph_lines(explanation, every=every), *_stack_lines(explanation, every)]
    return "\n".join(printable(line) for line in lines)


def root_cause_line(explanation: RunExplanation) -> str:
    """The most severe root cause in one line."""
    snapshot = explanation.snapshot
    for root_cause in explanation.graph.root_causes:
        if _is_on_time(explanation):
            took_s = snapshot.taken_s - snapshot.began_s
            return f"nobody: nothing is wrong after {took_s:.1f} s; {explanation.nodes[root_cause.nodes[0]].name} works"
        return _root_cause_text(explanation, root_cause)
    if not snapshot.flow:
        return "no flow is running: the move is the driver's (a checkpoint, an evaluation's end, a start)"
    return "nobody: every wait is short, so it moves, or has stood still for seconds only; ask again"


def _is_on_time(explanation: RunExplanation) -> bool:
    """Whether a stage is computing, and the step is not late yet."""
    snapshot, root_causes = explanation.snapshot, explanation.graph.root_causes
    took_s, expected_s = snapshot.taken_s - snapshot.began_s, snapshot.expected_s or 0.0
    return bool(root_causes) and root_causes[0].cause == "busy" and took_s < max(SETTLED_S, TIMES_EXPECTED * expected_s)


def graph_lines(explanation: RunExplanation, *, every: bool = False) -> Iterator[str]:
    """The root causes, what to do, and the waits, the longest first."""
    yield f"root cause: {root_cause_line(explanation)}"
    root_causes = explanation.graph.root_causes
    for root_cause in root_causes[:1] if not _is_on_time(explanation) else ():
        look = explanation.looks.get(explanation.processes_of(root_cause)[0])
        yield f"what to do: {WHAT_TO_DO[root_cause.cause].format(pid=look.record.pid if look else '')}"
    others = root_causes[1:] if every else root_causes[1:NUM_CULPRITS]
    yield from (f"also: {_root_cause_text(explanation, root_cause)}" for root_cause in others)
    if left := len(root_causes) - 1 - len(others):
        yield f"and {left} more"
    waiting = [node for node in explanation.graph.nodes if node.wait is not None]
    ahead = list(_ahead_lines(explanation.snapshot))
    if waiting or ahead:
        yield "who waits for what:"
    yield from (f"  {line}" for line in ahead)
    for node in waiting if every else waiting[:NUM_NODES]:
        yield f"  {_node_text(explanation, node)}"
    if not every and len(waiting) > NUM_NODES:
        yield f"  and {len(waiting) - NUM_NODES} more"


def explanation_json(explanation: RunExplanation) -> bytes:
    """The diagnosis as JSON."""
    return msgspec.json.format(msgspec.json.encode(explanation), indent=1)


def _head(explanation: RunExplanation) -> Iterator[str]:
    snapshot = explanation.snapshot
    if snapshot.flow:
        took_s = snapshot.taken_s - snapshot.began_s
        expected = f"; {snapshot.expected_s:.1f} s were expected" if snapshot.expected_s else ""
        yield f"flow {snapshot.flow!r}, step {snapshot.step} ({snapshot.phase}), under way for {took_s:.1f} s{expected}"


def _ahead_lines(snapshot: Snapshot) -> Iterator[str]:
    """What generation waits for, if steps overlap."""
    if (ahead := snapshot.ahead) is None:
        return
    following = snapshot.step + ahead.num_under_way
    for group in ahead.idle:
        if ahead.num_under_way > ahead.max_staleness:
            until = f"step {snapshot.step} has been trained (max_staleness {ahead.max_staleness})"
        else:
            until = f"step {following - 1} has been trained: a pause follows (evaluation, checkpoint, end of the run)"
        yield f"{group} of step {following} waits until {until}"


def _root_cause_text(explanation: RunExplanation, root_cause: RootCause) -> str:
    behind = {0: "", 1: "; 1 other waits for it"}.get(
        root_cause.num_waiting, f"; {root_cause.num_waiting} others wait for it"
    )
    nodes = [explanation.nodes[name] for name in root_cause.nodes]
    if root_cause.cause == "deadlock":
        return f"deadlock: {', '.join(_waits_for(node) for node in nodes)}{behind}"
    if root_cause.cause == "mismatch":
        texts = (_waits_for(node) + (f", but {node.remark}" if len(nodes) == 1 else "") for node in nodes)
        return f"collectives that do not fit: {', '.join(texts)}{behind}"
    if root_cause.cause == "nobody left":
        return f"{_waits_for(nodes[0])}, and nobody is left who could end that{behind}"
    look = explanation.looks.get(nodes[0].process)
    return (
        f"{nodes[0].name}{_process_text(root_cause.cause, nodes[0], look)}{_lease_text(explanation, nodes[0])}{behind}"
    )


def _process_text(cause: Cause, node: WaitNode, look: Look | None) -> str:
    if look is None:
        return ", whose process has not started yet"
    pid = look.record.pid
    name = "" if node.name.endswith(f" {pid}") else f" (process {pid})"
    if cause in ("gone", "stopped"):
        return f"{name} is {cause}"
    if look.state.condition == "unknown":
        return f"{name} on {look.record.host} does not say that it waits"
    remark = f" ({node.remark})" if node.remark else ""
    what = "waits for nobody" if node.wait is None else f"waits for {node.wait.target}{remark}"
    doing = "computes" if look.state.computes else "stands still"
    return (
        f"{name} {what} and {doing}: {look.state.condition}, {look.state.cores:.2f} cores now, "
        f"{look.state.cpu_s:.0f} s of processor time so far, {look.state.rss_bytes / 2**20:.0f} MiB"
    )


def _lease_text(explanation: RunExplanation, node: WaitNode) -> str:
    turns = sorted(
        {
            waiter.wait.number
            for waiter in explanation.graph.nodes
            if waiter.wait is not None and waiter.wait.kind == "lease" and node.name in waiter.whose_move
        }
    )
    return "".join(f"; it has devices that turn {turn} waits for" for turn in turns)


def _waits_for(node: WaitNode) -> str:
    return f"{node.name} waits for {node.wait.target}" if node.wait else node.name


def _node_text(explanation: RunExplanation, node: WaitNode) -> str:
    assert node.wait is not None, f"{node.name} does not wait"
    waited_s = explanation.snapshot.taken_s - node.wait.since_s
    remark = f" ({node.remark})" if node.remark else ""
    movers = ", ".join(node.whose_move) or "nobody"
    since = f"since {waited_s:.1f} s" if node.wait.kind != "backend collective" else "as its stack says"
    return f"{_waits_for(node)} {since}{remark} -> {movers}"


# -- stacks ----------------------------------------------------------------------------------------------------------


def _stack_lines(explanation: RunExplanation, every: bool) -> Iterator[str]:
    for name, look in explanation.looks.items():
        if look.stacks is None and not every:
            continue
        yield ""
        state = look.state
        host = "" if state.condition != "unknown" else f" on {look.record.host}"
        yield (
            f"{name} (process {look.record.pid}{host}): {state.condition}, {state.cores:.2f} cores now, "
            f"{state.rss_bytes / 2**20:.0f} MiB"
        )
        if look.stacks is not None:
            threads = [thread for thread in look.stacks.threads if every or not thread.is_idle]
            threads.sort(key=lambda thread: thread.thread != "MainThread" and not thread.thread.startswith("lane"))
            yield f"  {_source_text(look.stacks, bool(threads))}"
            for thread in threads if every else threads[:NUM_CULPRITS]:
                yield from _thread_lines(thread, every)
        if look.log_tail:
            yield f"  last lines of {look.record.log_path}"
            yield from (f"    {line}" for line in look.log_tail)


def _thread_lines(thread: ThreadStack, every: bool) -> Iterator[str]:
    yield f"    thread {thread.thread or '(no name)'}"
    frames = thread.frames if every else _telling(thread.frames)
    left = 0 if every else len(frames) - NUM_INNER - NUM_OUTER
    for number, frame in enumerate(frames):
        if left <= 0 or number < NUM_INNER or number >= NUM_INNER + left:
            yield f"      {_frame_text(frame)}"
        elif number == NUM_INNER:
            yield f"      ... {left} more"


def _telling(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Drops the frames that start every thread and call of a worker, and all but two of the innermost native ones: the
    Python frames above are more informative."""
    named = [frame for frame in frames if not frame.function.startswith("0x")]
    first = next((number for number, frame in enumerate(named) if frame.file.endswith(".py")), 0)
    start = next((number for number, frame in enumerate(named) if _starts(frame)), len(named))
    return (*named[: min(first, 2)], *named[first : max(start, first + 1)])


def _starts(frame: Frame) -> bool:
    return any(frame.name == name and frame.file.endswith(file) for name, file in STARTS)


def _source_text(stacks: Stacks, has_threads: bool) -> str:
    if has_threads:
        return f"stack, by {stacks.source}, innermost first"
    return f"stack, by {stacks.source}: it waits for the driver's next call" if stacks.threads else stacks.source


def _frame_text(frame: Frame) -> str:
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.function}  {frame.file}{line}"
