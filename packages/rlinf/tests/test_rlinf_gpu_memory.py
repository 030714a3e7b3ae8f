"""What a run measures of its GPUs: memory.json, the report, and the next plan."""

import json
from types import SimpleNamespace

from rlinf.cli.explain_command import _gpu_memory as explained
from rlinf.loop.gpu_memory import GpuMemoryHistory
from rlinf.planning.memory import Load, device_place, host_place
from rlinf.planning.plans import _held_bytes
from rlinf.report.page import _gpu_memory
from rlinf_sched import Plan, StagePlan
from rlinf_sched.derive import RankMemory

GIB = 1 << 30


def test_a_run_writes_what_the_driver_counted_beside_what_was_predicted(tmp_path):
    loads = [
        Load(group=name, memory=RankMemory(weights=8 * GIB), num_items=1, offload=False)
        for name in ("rollout", "actor")
    ]
    stages = tuple(
        StagePlan(stage=name, devices=(0,), num_ranks=2, granularity=0, offload=False, turn=0)
        for name in ("rollout", "reward", "actor")
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    held = {"rollout": [9 * GIB, 10 * GIB], "actor": [None, None]}
    executor = SimpleNamespace(group=lambda name: SimpleNamespace(call=lambda method: held[name]))
    folder = SimpleNamespace(write=lambda name, text: (tmp_path / name).write_text(text))

    GpuMemoryHistory(folder, plan, host_place(80 * GIB, loads)).read(executor)
    assert not (tmp_path / "memory.json").exists(), "slots of a CPU"
    GpuMemoryHistory(folder, plan, device_place("H100", 80 * GIB, loads)).read(executor)
    values = json.loads((tmp_path / "memory.json").read_text())
    assert values["roles"] == {"rollout": {"predicted_bytes": loads[0].predicted_gpu_bytes, "measured_bytes": 10 * GIB}}
    assert _held_bytes(tmp_path / "memory.json") == {"rollout": 10 * GIB}
    assert _held_bytes(tmp_path / "other.json") == {}
    page = _gpu_memory(SimpleNamespace(memory=values))
    assert "11.1 GiB" in page and "10.0 GiB" in page and "+11.0%" in page and "80.0 GiB" in page
    assert _gpu_memory(SimpleNamespace(memory={})) == ""
    lines = [line.split() for line in explained(tmp_path).strip().splitlines()]
    assert lines[1:] == [["rollout", "11.1", "10.0", "+11.0%"], ["the", "GPU", "has", "80.0"]]
    assert explained(tmp_path / "elsewhere") == ""
