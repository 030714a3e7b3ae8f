"""Decisions between steps: what has drifted, whether another plan pays, and how to get there.

The full search takes about a second at 1,024 devices, too long between two steps. The controller looks at neighbours of
the current plan only: some devices of one worker group go to another, or one group changes its parallel size.
Neighbours that help the drifted stages come first, and a fixed number of them is simulated. Where drift calls for
another mode altogether, the planner has to be asked.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlinf_sched.dynamic.drift import DriftDetector
from rlinf_sched.dynamic.transition import Transition, make_transition, transition_seconds
from rlinf_sched.errors import PlanError, SchedError, did_you_mean
from rlinf_sched.plan import Plan, StagePlan
from rlinf_sched.problem import Problem
from rlinf_sched.profile import Profiles, StageProfile
from rlinf_sched.simulator import Timeline, simulate

NUM_SIMULATED = 16
"""Neighbours that a decision looks at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Another plan, and whether it pays."""

    plan: Plan
    transition: Transition
    gain_s: float
    """Seconds by which each step becomes shorter."""
    cost_s: float
    """Seconds that the transition takes, once."""
    admitted: bool
    """Whether the gain over the horizon exceeds the cost."""
    reason: str
    """Why, for people."""


@dataclass(kw_only=True, slots=True)
class Controller:
    """Watches a run and decides.

    Example: after every step
        for stage, factor in controller.observe(measured).items():
            controller.set_profile(stage, probe(stage))  # or: controller.rescale(stage, factor)
        if (proposal := controller.propose()) and proposal.admitted:
            controller.adopt(proposal)  # and carry out proposal.transition
    """

    problem: Problem
    plan: Plan
    horizon_steps: int = 50
    """Steps within which a transition has to pay."""
    restart_s: float = 10.0
    """Seconds to restart the processes of a worker group that moves."""
    detector: DriftDetector = field(default_factory=DriftDetector)
    """The detector whose settings are used for every stage."""
    _detectors: dict[str, DriftDetector] = field(default_factory=dict)
    step_s: float = field(default=0.0, init=False)
    """Predicted seconds of a step under the current plan."""
    _predicted_s: dict[str, float] = field(default_factory=dict)
    _num_transitions: int = 0

    def __post_init__(self) -> None:
        settings = {
            name: getattr(self.detector, name)
            for name in ("least_drift", "false_alarms_per_step", "least_noise", "first_noise")
        }
        self._detectors = {stage.name: DriftDetector(**settings) for stage in self.problem.flow.stages}
        self._predict()

    @property
    def predicted_s(self) -> Mapping[str, float]:
        """Stage -> seconds that it computes in a step, on the busiest of its instances."""
        return self._predicted_s

    def observe(self, measured_s: Mapping[str, float]) -> dict[str, float]:
        """Takes in a step.

        Args:
            measured_s: stage -> seconds that its busiest instance computed; stages may be missing.

        Returns:
            stage -> factor of those whose time has drifted for good: profile these anew, and only these.

        Raises:
            SchedError: no such stage, or a time that is not positive.
        """
        drifted = {}
        for name, seconds in measured_s.items():
            if name not in self._detectors:
                raise SchedError(f"measured_s has {name!r}{did_you_mean(name, self._detectors)}")
            if not seconds > 0:
                raise SchedError(f"measured_s[{name!r}]={seconds} must be positive; leave out a stage that did not run")
            factor = self._detectors[name].observe(seconds, self._predicted_s[name])
            if factor is not None:
                drifted[name] = factor
        return drifted

    def rescale(self, stage: str, factor: float) -> None:
        """Takes every time of the stage's profile times `factor`: in place of a new profile."""
        profile = self.problem.profile(stage)
        instances = tuple(
            replace(
                instance,
                points=tuple(replace(point, seconds=point.seconds * factor) for point in instance.points),
                step_s=instance.step_s * factor,
            )
            for instance in profile.instances
        )
        self.set_profile(stage, replace(profile, instances=instances))

    def set_profile(self, stage: str, profile: StageProfile) -> None:
        """Makes all further predictions with this profile."""
        self.problem.profile(stage)
        stages = {**self.problem.profiles.stages, stage: profile}
        self.problem = replace(self.problem, profiles=Profiles(stages=stages))
        self._predict()

    def propose(self, num_simulated: int = NUM_SIMULATED) -> Proposal | None:
        """The best neighbour of the current plan; None where none has a shorter step."""
        best, best_s, tried = None, self.step_s, 0
        for neighbour in self._neighbours():
            if tried == num_simulated:
                break
            try:
                timeline = simulate(self.problem, neighbour)
            except SchedError:  # a parallel size that the stage has no profile for
                continue
            tried += 1
            if timeline.step_s < best_s and _fits(self.problem, neighbour, timeline):
                best, best_s = neighbour, timeline.step_s
        if best is None:
            return None
        cost_s = transition_seconds(self.problem, self.plan, best, restart_s=self.restart_s)
        gain_s = self.step_s - best_s
        admitted = gain_s * self.horizon_steps > cost_s
        return Proposal(
            plan=best,
            transition=make_transition(self.problem.flow, self.plan, best, number=self._num_transitions),
            gain_s=gain_s,
            cost_s=cost_s,
            admitted=admitted,
            reason=f"{best.reason}: a step of {best_s:.3g} s in place of {self.step_s:.3g} s; the transition takes "
            f"{cost_s:.3g} s and is paid back after {cost_s / gain_s:.1f} steps "
            f"({'within' if admitted else 'beyond'} the horizon of {self.horizon_steps})",
        )

    def adopt(self, proposal: Proposal) -> None:
        """Takes the proposal's plan for the current one.

        Raises:
            PlanError: it was not admitted.
        """
        if not proposal.admitted:
            raise PlanError(f"a proposal that was not admitted: {proposal.reason}; keep the plan")
        self.plan = proposal.plan
        self._num_transitions += 1
        self._predict()

    def _predict(self) -> None:
        timeline = simulate(self.problem, self.plan)
        self.step_s = timeline.step_s
        predicted = {name: timeline.busiest_s(name, "compute", "step") for name in timeline.stages}
        for name, seconds in predicted.items():
            if seconds != self._predicted_s.get(name):
                self._detectors[name].reset()
        self._predicted_s = predicted

    def _neighbours(self) -> Iterator[Plan]:
        """The neighbours of the current plan, each once; those that relieve the slowest group come first."""
        flow = self.problem.flow
        groups = {group: self.plan.stage(names[0]) for group, names in flow.workers.items()}
        load = {group: sum(self._predicted_s[name] for name in names) for group, names in flow.workers.items()}
        placed = [group for group in groups if groups[group].devices]
        by_load = sorted(placed, key=lambda group: -load[group])
        for share in (8, 16, 4):
            for receiver in by_load:
                for giver in reversed(by_load):
                    if set(groups[giver].devices).isdisjoint(groups[receiver].devices):
                        yield from self._moved(groups[giver], groups[receiver], giver, receiver, share)
        for group in by_load:
            yield from self._resized(group, groups[group])

    def _moved(self, giver: StagePlan, receiver: StagePlan, gives: str, takes: str, share: int) -> Iterator[Plan]:
        spans = [max(1, len(one.devices) // one.num_ranks) for one in (giver, receiver)]
        unit = math.lcm(*spans)
        count = max(unit, len(giver.devices) // share // unit * unit)
        if count >= len(giver.devices) or {gives, takes} & set(self.problem.pinned_devices):
            return
        left, moved = giver.devices[:-count], giver.devices[-count:]
        others = [one.devices for one in self.plan.stages if one.devices not in (giver.devices, receiver.devices)]
        shared = set().union(*others)
        if shared & set(moved):
            return
        grown = tuple(sorted(receiver.devices + moved))
        stages = tuple(
            replace(one, devices=devices, num_ranks=len(devices) // max(1, len(one.devices) // one.num_ranks))
            if (devices := {giver.devices: left, receiver.devices: grown}.get(one.devices)) is not None and one.devices
            else one
            for one in self.plan.stages
        )
        yield self._named(stages, f"{count} devices of {gives} go to {takes}")

    def _resized(self, group: str, placed: StagePlan) -> Iterator[Plan]:
        names = self.problem.flow.workers[group]
        for span in dict.fromkeys(one.num_devices for one in self.problem.profile(names[0]).instances):
            if span and len(placed.devices) % span == 0 and len(placed.devices) // span != placed.num_ranks:
                stages = tuple(
                    replace(one, num_ranks=len(placed.devices) // span) if one.stage in names else one
                    for one in self.plan.stages
                )
                yield self._named(stages, f"{group} in instances of {span} devices")

    def _named(self, stages: tuple[StagePlan, ...], reason: str) -> Plan:
        return replace(self.plan, stages=stages, reason=reason, prediction=None)


def _fits(problem: Problem, plan: Plan, timeline: Timeline) -> bool:
    """Whether the plan fits into memory, by the first device of every stage: its other devices carry the same."""
    devices = {placed.devices[0] for placed in plan.stages if placed.devices}
    return all(timeline.memory(d).peak_bytes <= problem.cluster.devices[d].memory_bytes for d in devices)
