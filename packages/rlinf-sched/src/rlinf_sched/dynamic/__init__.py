"""Scheduling while a run goes on: between steps, from step times that have drifted to another plan and the transition
there; within a step, from the draining tail of a rollout to the stages that wait for it.
"""

from rlinf_sched.dynamic.controller import Controller, Proposal
from rlinf_sched.dynamic.drift import DriftDetector, cusum_threshold
from rlinf_sched.dynamic.long_tail import (
    LongTailOutcome,
    LongTailPolicy,
    best_long_tail,
    least_step_s,
    parallel_choices,
    simulate_long_tail,
)
from rlinf_sched.dynamic.multi_turn import MultiTurnOutcome, Priority, simulate_multi_turn
from rlinf_sched.dynamic.transition import (
    Action,
    Outcome,
    Transition,
    check_transitions,
    execute,
    make_transition,
    transition_seconds,
)

__all__ = [
    "Action",
    "Transition",
    "Outcome",
    "make_transition",
    "check_transitions",
    "transition_seconds",
    "execute",
    "DriftDetector",
    "cusum_threshold",
    "Controller",
    "Proposal",
    "LongTailPolicy",
    "LongTailOutcome",
    "simulate_long_tail",
    "best_long_tail",
    "parallel_choices",
    "least_step_s",
    "Priority",
    "MultiTurnOutcome",
    "simulate_multi_turn",
]
