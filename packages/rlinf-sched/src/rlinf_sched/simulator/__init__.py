"""The simulator: executes a plan event by event and records what happens when on which device.

`simulate` lowers a problem and a plan to flat arrays (`lowering`), the native core (csrc/sched/simulator) runs them,
and a `Timeline` provides queries over the resulting spans.
"""

from rlinf_sched.simulator.simulation import simulate
from rlinf_sched.simulator.timeline import MemoryCurve, Timeline

__all__ = ["simulate", "Timeline", "MemoryCurve"]
