"""What is read out of stacks."""

import pytest

from rlinf_workers.explaining.stacks import Frame, Stacks, ThreadStack, backend_collective, parse_faulthandler

TORCH = "/env/lib/python3.11/site-packages/torch"
DUMP = f"""worker actor/0, process 41, devices cpu:0
Thread 0x00007f2b [heartbeat] (most recent call first):
  File "/src/rlinf_workers/launchers/child.py", line 145 in _beat
Current thread 0x00007f2c (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3003 in all_gather_into_tensor
  File "{TORCH}/distributed/c10d_logger.py", line 81 in wrapper
  File "/src/rlinf_workers/trainers/fsdp2/backend.py", line 90 in forward
"""


def main_thread(*frames: tuple[str, str]) -> Stacks:
    """Frames as (function, file), innermost first."""
    stack_frames = tuple(Frame(function=function, file=file, line=1) for function, file in frames)
    return Stacks(source="py-spy", threads=(ThreadStack(thread="MainThread", frames=stack_frames),))


def test_the_stacks_of_faulthandler_are_found_among_other_lines():
    beat, main = parse_faulthandler(DUMP)
    assert (beat.thread, beat.is_idle) == ("heartbeat", True)
    assert (main.frames[0].name, main.frames[0].line, main.is_idle) == ("all_gather_into_tensor", 3003, False)
    assert backend_collective(Stacks(source="faulthandler", threads=(beat, main))) == "all_gather_into_tensor"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([("wait_for_unshard", f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py")], "wait_for_unshard"),
        (
            [("__call__", f"{TORCH}/_ops.py"), ("wait_tensor", f"{TORCH}/distributed/_functional_collectives.py")],
            "wait_tensor",
        ),
        (
            [
                ("pthread_cond_wait", "/lib/libc.so.6"),
                ("gloo::AlgorithmWait", f"{TORCH}/lib/libtorch_cpu.so"),
                ("c10d::Work::wait", f"{TORCH}/lib/libtorch_cpu.so"),
                ("backward", f"{TORCH}/autograd/graph.py"),
            ],
            "c10d::Work::wait",
        ),
        (
            [("forward", f"{TORCH}/nn/modules/linear.py"), ("all_reduce", f"{TORCH}/distributed/distributed_c10d.py")],
            None,
        ),
        ([("dispatch", f"{TORCH}/distributed/tensor/_dispatch.py")], None),
        ([("train", "/home/me/nccl.py")], None),
    ],
)
def test_a_thread_waits_for_other_ranks_where_torch_distributed_is_innermost(frames, expected):
    assert backend_collective(main_thread(*frames)) == expected
