"""Finds the best execution of a flow: see `search`."""

from rlinf_sched.planner.make import plan

__all__ = ["plan"]
