"""The simulator: executes a plan event by event and says when what happens on which device.

`simulate` lowers a problem and a plan to flat arrays (`lowering`), the native core (csrc/sched/simulator) runs them,
and a `Timeline` answers what one may ask of the spans that come back.
"""

from rlinf_sched.simulator.simulation import simulate
from rlinf_sched.simulator.timeline import MemoryCurve, Timeline

__all__ = ["simulate", "Timeline", "MemoryCurve"]
