"""From a problem to its explained plan: planner, simulator and what-if answers in one call."""

from collections.abc import Sequence

from rlinf_sched.explain.explanation import Explanation, explain
from rlinf_sched.explain.from_timeline import path_of, spans_of
from rlinf_sched.explain.what_if import what_if
from rlinf_sched.plan import Mode, Plan
from rlinf_sched.planner import plan as make_plan
from rlinf_sched.problem import Problem
from rlinf_sched.simulator import simulate


def explain_problem(
    problem: Problem, *, modes: Sequence[Mode] | None = None, asks_what_if: bool = False
) -> Explanation:
    """Plans a problem, simulates a step of the plan, and explains both.

    Args:
        modes: plan only these; None: all.
        asks_what_if: also plan the changed problems of `what_if.changes`.

    Raises:
        SchedError: the problem contradicts itself, or no plan fits.
    """

    def planner(changed: Problem) -> Plan:
        return make_plan(changed) if modes is None else make_plan(changed, modes=modes)

    plan = planner(problem)
    timeline = simulate(problem, plan)
    answers = what_if(problem, plan, planner) if asks_what_if else ()
    return explain(problem, plan, spans_of(timeline), path_of(timeline), answers)
