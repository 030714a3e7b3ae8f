"""Finds the best plan of a flow: see `search`."""

from rlinf_sched.planner.judged import Judged
from rlinf_sched.planner.make import Planned, best_plan, plan_and_compare

__all__ = ["Judged", "Planned", "best_plan", "plan_and_compare"]
