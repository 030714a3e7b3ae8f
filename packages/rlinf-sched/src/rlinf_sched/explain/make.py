"""Makes the explained plan of a problem: planner, gains and what-if questions in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlinf_sched.explain.explanation import PlanExplanation, explain
from rlinf_sched.explain.from_timeline import path_of, spans_of
from rlinf_sched.explain.gains import gains_of
from rlinf_sched.explain.quantities import seconds
from rlinf_sched.explain.what_if import what_if
from rlinf_sched.plan import Mode, Plan
from rlinf_sched.planner import Planned, best_plan as make_plan, plan_and_compare
from rlinf_sched.problem import Problem


def explain_problem(
    problem: Problem,
    *,
    modes: Sequence[Mode] | None = None,
    num_draws: int = 0,
    asks_what_if: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> PlanExplanation:
    """Plans a problem and explains the plan and its simulated step.

    Args:
        modes: plan only these; None: all.
        num_draws: as in `best_plan`; the drawn step closest to their mean is shown.
        asks_what_if: also plan the changed problems of `what_if.changes`.
        on_progress: called with what is done next, in words.

    Raises:
        SchedError: the problem is inconsistent, or no plan fits.
    """
    on_progress("planning")
    planned = plan_and_compare(problem, modes, num_draws=num_draws)
    path_s = path_of(planned.timeline)
    plan = _with_reasons(planned, path_s)
    answers = (
        what_if(
            problem,
            plan,
            lambda changed, other_modes: make_plan(changed, other_modes or modes, num_draws=num_draws),
            on_progress=lambda text: on_progress(f"planning, what if: {text}"),
        )
        if asks_what_if
        else ()
    )
    on_progress("computing what each decision of the plan saves")
    gains = gains_of(problem, plan, num_draws=num_draws)
    return explain(problem, plan, spans_of(planned.timeline), path_s, answers, gains)


def _with_reasons(planned: Planned, path_s: Mapping[str, float]) -> Plan:
    """The plan with a reason for each runner-up: the term that is larger on its critical path."""
    prediction = planned.plan.prediction
    assert prediction is not None, "the planner predicts"
    runners_up = tuple(
        replace(row, reason=lost_term(path_s, path_of(other.timeline)))
        for row, other in zip(prediction.runners_up, planned.others, strict=True)
    )
    return replace(planned.plan, prediction=replace(prediction, runners_up=runners_up))


def lost_term(chosen_s: Mapping[str, float], other_s: Mapping[str, float]) -> str:
    """The term of the critical path in which the other plan is worst, as text; empty if there is none.

    Args:
        chosen_s, other_s: label -> seconds on the critical path.
    """
    more_s = {label: spent_s - chosen_s.get(label, 0.0) for label, spent_s in other_s.items()}
    label = max(more_s, key=lambda label: more_s[label], default="")
    if not label or more_s[label] <= 0:
        return ""
    return f"{seconds(more_s[label])} more of {label} on its critical path ({seconds(other_s[label])})"
