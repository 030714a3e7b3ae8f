"""Simulates a plan for a problem."""

from rlinf_sched.errors import SchedError
from rlinf_sched.plan import Plan
from rlinf_sched.problem import Problem
from rlinf_sched.simulator.lowering import Lowered, lower
from rlinf_sched.simulator.timeline import Timeline


def simulate(problem: Problem, plan: Plan, *, seed: int | None = None, num_steps: int = 1) -> Timeline:
    """Executes `num_steps` steps of the plan.

    Args:
        problem: flow, profiles, cluster and items of a step.
        plan: a plan for that flow; its prediction is ignored.
        seed: None gives every stage its typical costs, the same in each step. A number draws them: an item's costs are
            at the same quantile in all stages (a long completion is long for all readers), with new draws in each step.
            At least 0.
        num_steps: at least 1. With `max_staleness` k at least 12 (k + 1) are run, to reach a steady state.

    Returns:
        the timeline; equal inputs give equal timelines, bit for bit.

    Raises:
        ProblemError, FlowError, PlanError: the problem or the plan is invalid, or a stage has no profile for the number
            of devices that the plan gives its instances.
        SchedError: `num_steps` or `seed` is too low, or the simulation deadlocks; the message shows what waits for
        what.
    """
    if num_steps < 1:
        raise SchedError(f"num_steps={num_steps} must be at least 1")
    if seed is not None and seed < 0:
        raise SchedError(f"seed={seed} must not be negative; None takes typical costs")
    problem.validate()
    plan.validate(problem.flow, problem.cluster)
    return execute(problem, plan, seed=seed, num_steps=num_steps)


def execute(problem: Problem, plan: Plan, *, seed: int | None = None, num_steps: int = 1) -> Timeline:
    """Does what `simulate` does, for a problem and a plan that are known to be valid."""
    return execute_lowered(problem, lower(problem, plan, seed=seed, num_steps=num_steps))


def execute_lowered(problem: Problem, lowered: Lowered) -> Timeline:
    """Executes a lowered plan, possibly with other times."""
    from rlinf_sched import _C  # the package imports without it

    try:
        outcome = _C.simulate(
            lowered.arrays,
            names=lowered.stages,
            num_items=problem.num_items,
            num_steps=lowered.num_steps,
            max_staleness=problem.flow.max_staleness,
            num_devices=problem.cluster.num_devices,
        )
    except _C.Standstill as e:
        raise SchedError(f"plan for flow {problem.flow.name!r}: {e}") from e
    return Timeline(
        stages=lowered.stages,
        num_steps=lowered.num_steps,
        max_staleness=problem.flow.max_staleness,
        num_devices=problem.cluster.num_devices,
        device_start=lowered.arrays["device_start"],
        device=lowered.arrays["device"],
        num_instances=lowered.arrays["num_instances"],
        resident_bytes=lowered.resident_bytes,
        leaving=lowered.leaving,
        work_bytes=lowered.work_bytes,
        item_work_bytes=lowered.item_work_bytes,
        **outcome,
    )
