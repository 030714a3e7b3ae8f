"""Conformance suite: checks that an environment keeps the rules of `BatchedEnv`.

    from rlinf_envs.testing import check_env
    check_env(lambda: MyBatchedEnv(num_envs=3))

Each broken rule gives one message with the expected and the actual value; all are reported together. Comparisons are
bitwise, because replays need identical numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_envs.core.episodes import Moment, Watchable
from rlinf_envs.core.protocol import (
    ActionSpec,
    BatchedEnv,
    EpisodeEnd,
    Observation,
    Replayable,
    StepResult,
    SupportsBegin,
    begins_rows,
    has_expert,
    observation_problem,
)
from rlinf_envs.core.seeding import episode_seed
from rlinf_envs.errors import ConformanceError, EnvError, RenderingUnavailableError


def check_env(make: Callable[[], BatchedEnv], *, num_steps: int = 60, seed: int = 0, seeds_matter: bool = True) -> None:
    """Checks the environment that `make` returns; raises ConformanceError with one line per broken rule.

    Each trial takes `num_steps` actions. At least one episode must end in them, otherwise an error reports that
    auto-reset could not be checked. `seeds_matter=False` allows environments whose episodes are all the same. `make` is
    called several times; with two or more rows, the independence of rows is checked too.
    """
    checks = (
        _check_specs,
        _check_steps,
        _check_auto_reset,
        _check_ends,
        _check_replay_in_new_object,
        _check_replay_in_used_object,
        _check_rows_are_independent,
        _check_seeds_differ,
        _check_chunk,
        _check_begin,
        _check_expert,
        _check_snapshot,
        _check_mistakes_are_refused,
        _check_render,
        _check_close,
    )
    violations: list[str] = []
    env = make()
    trial = _Trial(make=make, env=env, num_steps=num_steps, seed=seed, seeds_matter=seeds_matter)
    for check in checks:
        try:
            check(trial)
        except ConformanceError as violation:
            violations.append(str(violation))
        except Exception as error:  # noqa: BLE001 the environment under test may raise anything
            violations.append(f"{_words(check)}: raised {type(error).__name__}: {error}")
        if violations and check is _check_specs:
            break  # without specs nothing else can be checked
    env.close()
    if violations:
        listed = "\n".join(f"- {violation}" for violation in violations)
        raise ConformanceError(f"{len(violations)} rule(s) of BatchedEnv broken:\n{listed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """State shared by the checks. `env` is used by all of them; `make` creates a fresh environment."""

    make: Callable[[], BatchedEnv]
    env: BatchedEnv
    num_steps: int
    seed: int
    seeds_matter: bool

    @property
    def seeds(self) -> list[int]:
        return [self.seed + 1000 * index for index in range(self.env.num_envs)]

    def actions(self, stream: int = 0) -> Tensor:
        """Returns random actions [num_steps, N, *action shape], the same for the same stream."""
        generator = torch.Generator().manual_seed(self.seed + stream)
        return sample_actions(self.env.action_spec, (self.num_steps, self.env.num_envs), generator)


def sample_actions(spec: ActionSpec, batch: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns actions [*batch, *action shape], uniform between the spec's bounds; a missing bound leaves an interval of
    length 2, -1..1 if both are missing."""
    shape = (*batch, *spec.shape)
    if spec.kind == "discrete":
        width = spec.high - spec.low + 1
        return spec.low + (torch.rand(shape, generator=generator) * width).long().clamp(max=width - 1)
    low = torch.where(spec.low.isfinite(), spec.low, torch.where(spec.high.isfinite(), spec.high - 2, -1.0))
    high = torch.where(spec.high.isfinite(), spec.high, low + 2)
    return low + torch.rand(shape, generator=generator) * (high - low)


def _words(check: Callable[[_Trial], None]) -> str:
    return check.__name__.removeprefix("_check_").replace("_", " ")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ConformanceError(rule)


def _run(env: BatchedEnv, seeds: Sequence[int], actions: Tensor) -> tuple[Observation, list[StepResult]]:
    first = env.reset(seeds)
    return first, [env.step(step_actions) for step_actions in actions]


def _row(observation: Observation, index: int) -> Observation:
    return {name: value[index : index + 1] for name, value in observation.items()}


def _difference(got: Observation, expected: Observation) -> str | None:
    """Describes the first difference of two observations; None if they are bitwise equal."""
    if set(got) != set(expected):
        return f"fields {sorted(got)} instead of {sorted(expected)}"
    for name, value in got.items():
        other = expected[name]
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if value != other:
                return f"{name}: {value} instead of {other}"
        elif value.shape != other.shape or value.dtype != other.dtype:
            return f"{name}: {list(value.shape)} {value.dtype} instead of {list(other.shape)} {other.dtype}"
        elif not torch.equal(value, other):
            where = [int(i) for i in (value != other).nonzero()[0]]
            return f"{name}{where}: {value[tuple(where)].item()!r} instead of {other[tuple(where)].item()!r}"
    return None


def _require_same_runs(
    got: tuple[Observation, list[StepResult]], expected: tuple[Observation, list[StepResult]], rule: str
) -> None:
    difference = _difference(got[0], expected[0])
    _require(difference is None, f"{rule}: after reset, {difference}")
    for step, (result, other) in enumerate(zip(got[1], expected[1], strict=True)):
        difference = _result_difference(result, other)
        _require(difference is None, f"{rule}: at step {step}, {difference}")


def _result_difference(got: StepResult, expected: StepResult) -> str | None:
    for name in ("rewards", "terminated", "truncated", "num_steps"):
        difference = _difference({name: getattr(got, name)}, {name: getattr(expected, name)})
        if difference is not None:
            return difference
    for name in ("observation", "final_observation"):
        difference = _difference(getattr(got, name), getattr(expected, name))
        if difference is not None:
            return f"{name}.{difference}"
    return None if got.episodes == expected.episodes else f"episodes {got.episodes} instead of {expected.episodes}"


def _require_observation(trial: _Trial, observation: Observation, where: str) -> None:
    problem = observation_problem(observation, trial.env.observation_spec, trial.env.num_envs)
    _require(problem is None, f"{where}{problem}")


def _require_vector(value: object, num_envs: int, dtype: torch.dtype, name: str) -> None:
    actual = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    _require(actual == f"[{num_envs}] {dtype}", f"step: {name} is {actual}; it must be [{num_envs}] {dtype}")


def _check_specs(trial: _Trial) -> None:
    env = trial.env
    _require(
        isinstance(env, BatchedEnv),
        "the object lacks members of rlinf_envs.core.protocol.BatchedEnv; make_env makes one of a gymnasium.Env: "
        "make_env(EnvSpec(kind='import', id='module:Class', num_envs=3))",
    )
    _require(isinstance(env.num_envs, int) and env.num_envs >= 1, f"num_envs is {env.num_envs!r}, not an integer >= 1")
    _require(len(env.observation_spec) > 0, "observation_spec is empty")
    for name, field in env.observation_spec.items():
        dtype = "uint8" if name.startswith("image.") else {"state": "float32", "instruction": "text"}.get(name)
        _require(dtype is not None, f'observation field {name!r}; allowed: "state", "image.<camera>", "instruction"')
        _require(field.dtype == dtype, f"observation field {name!r} is {field.dtype}; it must be {dtype}")
    spec = env.action_spec
    for bound_name, bound in (("low", spec.low), ("high", spec.high)):
        actual, expected = f"{list(bound.shape)} {bound.dtype}", f"{list(spec.shape)} {spec.dtype}"
        _require(actual == expected, f"action_spec.{bound_name} is {actual}; it must be {expected}")
    _require(bool((spec.low <= spec.high).all()), "action_spec.low exceeds action_spec.high somewhere")
    notes_good = isinstance(env.notes, tuple) and all(isinstance(note, str) for note in env.notes)
    _require(notes_good, f"notes is {env.notes!r}; it must be a tuple of strings")


def _check_steps(trial: _Trial) -> None:
    """Checks shapes, dtypes and the bookkeeping of every step of one trial."""
    env, num_envs = trial.env, trial.env.num_envs
    first, results = _run(env, trial.seeds, trial.actions())
    _require_observation(trial, first, "reset()")
    returns, lengths, counts = [0.0] * num_envs, [0] * num_envs, [0] * num_envs
    for step, result in enumerate(results):
        _require_observation(trial, result.observation, "step().observation")
        _require_observation(trial, result.final_observation, "step().final_observation")
        _require_vector(result.rewards, num_envs, torch.float32, "rewards")
        _require_vector(result.terminated, num_envs, torch.bool, "terminated")
        _require_vector(result.truncated, num_envs, torch.bool, "truncated")
        _require_vector(result.num_steps, num_envs, torch.int64, "num_steps")
        _require(
            bool((result.num_steps == 1).all()), f"step {step}: num_steps is {result.num_steps.tolist()}, not all 1"
        )
        both = result.terminated & result.truncated
        _require(not both.any(), f"step {step}: env {_first(both)} is both terminated and truncated; terminated wins")
        ended = result.terminated | result.truncated
        indices = [end.env_index for end in result.episodes]
        _require(
            indices == ended.nonzero().flatten().tolist(),
            f"step {step}: episodes tells of envs {indices}, but terminated | truncated is {ended.tolist()}",
        )
        for index in range(num_envs):
            returns[index] += float(result.rewards[index])
            lengths[index] += 1
            if not ended[index]:
                difference = _difference(_row(result.final_observation, index), _row(result.observation, index))
                rule = f"step {step}: env {index} goes on, so final_observation must equal observation"
                _require(difference is None, f"{rule}; {difference}")
        for end in result.episodes:
            index = end.env_index
            _require_episode(trial, end, returns[index], lengths[index], counts[index], step)
            returns[index], lengths[index], counts[index] = 0.0, 0, counts[index] + 1


def _require_episode(trial: _Trial, end: EpisodeEnd, return_: float, length: int, count: int, step: int) -> None:
    where = f"step {step}: the record of env {end.env_index}"
    _require(end.length == length, f"{where} has length {end.length}; it took {length} actions")
    _require(end.episode_index == count, f"{where} has episode_index {end.episode_index}; it had finished {count}")
    seed = episode_seed(trial.seeds[end.env_index], count)
    _require(
        end.seed == seed, f"{where} has seed {end.seed}; episode_seed({trial.seeds[end.env_index]}, {count}) = {seed}"
    )
    close = abs(end.return_ - return_) <= 1e-5 * max(
        1.0, abs(return_), float(length)
    )  # rewards were rounded to float32
    _require(close, f"{where} has return_ {end.return_}; its rewards add up to {return_}")
    limit = trial.env.max_episode_steps
    _require(limit is None or length <= limit, f"{where} has length {length}, over max_episode_steps={limit}")
    _require((end.success_once is None) == (end.success_at_end is None), f"{where} knows only one kind of success")
    _require(not end.success_at_end or bool(end.success_once), f"{where}: success at the end, but not once")


def _check_auto_reset(trial: _Trial) -> None:
    """Checks that after an episode's end a row is where a reset with the next episode's seed would put it."""
    _, results = _run(trial.env, trial.seeds, trial.actions())
    ends = [(result, end) for result in results for end in result.episodes]
    _require(
        bool(ends),
        f"no episode ended in {trial.num_steps} steps, so auto-reset cannot be checked; pass a larger num_steps or "
        "make episodes shorter (max_episode_steps)",
    )
    with contextlib.closing(trial.make()) as fresh:
        for result, end in ends[:4]:
            seed = episode_seed(trial.seeds[end.env_index], end.episode_index + 1)
            expected = fresh.reset([seed] * trial.env.num_envs)
            difference = _difference(_row(result.observation, end.env_index), _row(expected, end.env_index))
            rule = f"episode {end.episode_index + 1} of env {end.env_index} must begin like reset(seed={seed})"
            _require(difference is None, f"{rule}; {difference}")


def _check_ends(trial: _Trial) -> None:
    """Checks that no action follows `terminated` if the environment does not define steps after the end."""
    env, past_ends = trial.env, list[Moment]()
    if not isinstance(env, Watchable):
        return
    env.watch(lambda moment: past_ends.append(moment) if moment.is_past_end else None)
    try:
        _run(env, trial.seeds, trial.actions())
    finally:
        env.watch(None)
    for moment in past_ends[:1]:
        raise ConformanceError(
            f"env {moment.env_index} was stepped after the end of its episode: action {moment.num_actions} of the one "
            f"with seed {moment.seed} came after terminated=True, and Gymnasium leaves undefined what a step does "
            "then; make it without ignore_terminations"
        )


def _check_replay_in_new_object(trial: _Trial) -> None:
    with contextlib.closing(trial.make()) as fresh:
        expected = _run(fresh, trial.seeds, trial.actions())
    got = _run(trial.env, trial.seeds, trial.actions())
    _require_same_runs(got, expected, "the same seeds and actions must give the same numbers in a new object")


def _check_replay_in_used_object(trial: _Trial) -> None:
    expected = _run(trial.env, trial.seeds, trial.actions())
    _run(trial.env, [seed + 1 for seed in trial.seeds], trial.actions(stream=1))
    got = _run(trial.env, trial.seeds, trial.actions())
    _require_same_runs(got, expected, "reset must forget what ran before")


def _check_rows_are_independent(trial: _Trial) -> None:
    """Checks that row i behaves as row 0 when it gets row 0's seed and actions."""
    if trial.env.num_envs == 1:
        return
    actions = trial.actions()
    first, results = _run(trial.env, trial.seeds, actions)
    last = trial.env.num_envs - 1
    first_swapped, results_swapped = _run(trial.env, trial.seeds[::-1], actions.flip(1))
    rule = f"rows must not depend on each other: seeds and actions of env 0 moved to env {last}"
    difference = _difference(_row(first_swapped, last), _row(first, 0))
    _require(difference is None, f"{rule}: after reset, {difference}")
    for step, (swapped, result) in enumerate(zip(results_swapped, results, strict=True)):
        difference = _difference(_row(swapped.observation, last), _row(result.observation, 0))
        _require(difference is None, f"{rule}: at step {step}, {difference}")


def _check_seeds_differ(trial: _Trial) -> None:
    if not trial.seeds_matter:
        return
    first, results = _run(trial.env, trial.seeds, trial.actions())
    other_first, others = _run(trial.env, [seed + 1 for seed in trial.seeds], trial.actions())
    same = _difference(first, other_first) is None and all(
        _difference(result.observation, other.observation) is None
        for result, other in zip(results, others, strict=True)
    )
    _require(not same, "different seeds gave the same observations throughout; if that is meant, seeds_matter=False")


def _check_chunk(trial: _Trial) -> None:
    """Checks that a chunk equals its actions in order and stops at an episode's end."""
    for num_actions in sorted({1, min(3, trial.num_steps), trial.num_steps}):
        actions = trial.actions()[:num_actions]
        _, singles = _run(trial.env, trial.seeds, actions)
        trial.env.reset(trial.seeds)
        chunk = trial.env.step_chunk(actions.transpose(0, 1))
        shape = (trial.env.num_envs, num_actions)
        _require(chunk.rewards.shape == shape, f"step_chunk: rewards {list(chunk.rewards.shape)}, not {list(shape)}")
        for index in range(trial.env.num_envs):
            _require_chunk_row(chunk, singles, index)


def _require_chunk_row(chunk: StepResult, singles: list[StepResult], index: int) -> None:
    ends = [step for step, result in enumerate(singles) if result.terminated[index] or result.truncated[index]]
    num_steps = ends[0] + 1 if ends else len(singles)
    where = f"step_chunk of {len(singles)} actions, env {index}"
    count = int(chunk.num_steps[index])
    _require(count == num_steps, f"{where}: num_steps is {count}; step by step it was {num_steps} to the episode's end")
    expected = torch.zeros(len(singles))
    for step in range(num_steps):
        expected[step] = singles[step].rewards[index]
    difference = _difference({"rewards": chunk.rewards[index]}, {"rewards": expected})
    _require(difference is None, f"{where}: {difference} (step by step, then 0.0 after an end)")
    last = singles[num_steps - 1]
    for name in ("terminated", "truncated"):
        same = bool(getattr(chunk, name)[index]) == bool(getattr(last, name)[index])
        _require(same, f"{where}: {name} differs from the same actions taken one by one")
    for name in ("observation", "final_observation"):
        difference = _difference(_row(getattr(chunk, name), index), _row(getattr(last, name), index))
        _require(difference is None, f"{where}: {name} differs from the same actions one by one: {difference}")
    of_chunk = [end for end in chunk.episodes if end.env_index == index]
    of_last = [end for end in last.episodes if end.env_index == index]
    _require(of_chunk == of_last, f"{where}: episodes {of_chunk}; one by one {of_last}")


def _check_begin(trial: _Trial) -> None:
    """Checks episodes that rows begin one after the other, if the environment can: row i waits for i actions of row 0,
    begins like a reset with its seed, and rests after its episode."""
    env, actions = trial.env, trial.actions()
    if not begins_rows(env):
        return
    first, results = _run(env, trial.seeds, actions)
    with contextlib.closing(trial.make()) as fresh:
        assert begins_rows(fresh), "make() must make the same kind of environment each time"
        for each in (env, fresh):
            _require_begin(trial, each, first, results)


def _require_begin(trial: _Trial, env: SupportsBegin, first: Observation, expected: Sequence[StepResult]) -> None:
    num_envs, actions = env.num_envs, trial.actions()
    num_done = [0] * num_envs
    has_ended = [False] * num_envs
    for time in range(trial.num_steps + num_envs - 1):
        if time < num_envs:
            begun = env.begin({time: trial.seeds[time]}, alone=time == 0)
            difference = _difference(begun, _row(first, time))
            _require(difference is None, f"begin must begin an episode like reset: env {time}, {difference}")
        runs = [row <= time and not has_ended[row] and num_done[row] < trial.num_steps for row in range(num_envs)]
        taken = [num_done[row] if runs[row] else 0 for row in range(num_envs)]
        result = env.step(torch.stack([actions[count, row] for row, count in enumerate(taken)]))
        for row in range(num_envs):
            where = f"episodes that begin one by one, env {row} at action {num_done[row]}"
            if not runs[row]:
                rests = (not has_ended[row] and row <= time) or int(result.num_steps[row]) == 0 == result.rewards[row]
                _require(bool(rests), f"{where}: a row at rest executes no actions; num_steps is {result.num_steps}")
                continue
            alone = expected[num_done[row]]
            num_done[row] += 1
            for name in ("rewards", "terminated", "truncated"):
                same = torch.equal(getattr(result, name)[row], getattr(alone, name)[row])
                _require(same, f"{where}: {name} differs from the episode after a reset")
            difference = _difference(_row(result.final_observation, row), _row(alone.final_observation, row))
            _require(difference is None, f"{where}: final_observation.{difference} after a reset")
            has_ended[row] = bool(alone.terminated[row] or alone.truncated[row])


def _check_expert(trial: _Trial) -> None:
    """Checks answers of the environment's expert, if it has one, and that asking changes nothing."""
    env, spec = trial.env, trial.env.action_spec
    if not has_expert(env):
        return
    first, expected = _run(env, trial.seeds, trial.actions())
    rows, results = list(range(env.num_envs))[::-1], []
    again = env.reset(trial.seeds)
    for step_actions in trial.actions():
        answer = env.expert_actions(rows, 2)
        shape = (env.num_envs, 2, *spec.shape)
        _require(answer.shape == shape, f"expert_actions must be {list(shape)}, and are {list(answer.shape)}")
        _require(answer.dtype == spec.dtype, f"expert_actions must be {spec.dtype}, and are {answer.dtype}")
        within = (answer >= spec.low).all() and (answer <= spec.high).all()
        _require(bool(within), "expert_actions must be within the bounds of the action spec")
        results.append(env.step(step_actions))
    _require_same_runs((again, results), (first, expected), "asking the expert must change nothing")


def _check_snapshot(trial: _Trial) -> None:
    """Checks snapshots, if the environment has them."""
    if not isinstance(trial.env, Replayable):
        return
    actions = trial.actions()
    half = (2 * trial.num_steps) // 3
    _run(trial.env, trial.seeds, actions[:half])
    rows = trial.env.snapshot()
    current = [trial.env.step(step_actions) for step_actions in actions[half:]]
    with contextlib.closing(trial.make()) as fresh:
        assert isinstance(fresh, Replayable), "make() must make the same kind of environment each time"
        before = fresh.restore(rows)
        after = [fresh.step(step_actions) for step_actions in actions[half:]]
    again = trial.env.restore(rows)
    difference = _difference(before, again)
    _require(difference is None, f"restore of one snapshot in two objects: {difference}")
    _require_same_runs((before, after), (before, current), "what follows a restore must be what followed the snapshot")


def _check_mistakes_are_refused(trial: _Trial) -> None:
    env, spec = trial.env, trial.env.action_spec
    _require_refused(lambda: env.reset(trial.seeds[:-1]), "reset with a seed too few")
    env.reset(trial.seeds)
    good = trial.actions()[0]
    _require_refused(lambda: env.step(good[:-1]), "step with an action too few")
    _require_refused(lambda: env.step(good[..., None].repeat_interleave(2, -1)), "step with actions of another shape")
    if spec.kind == "continuous":
        _require_refused(lambda: env.step(torch.full_like(good, float("nan"))), "step with nan actions")
    else:
        _require_refused(lambda: env.step(good * 0 + spec.high + 1), "step with a choice over action_spec.high")
    with contextlib.closing(trial.make()) as fresh:
        _require_refused(lambda: fresh.step(good), "step before reset")


def _require_refused(mistake: Callable[[], object], what: str) -> None:
    try:
        mistake()
    except ValueError:  # EnvError is one
        return
    raise ConformanceError(f"{what} must raise ValueError (or EnvError), not pass silently")


def _check_render(trial: _Trial) -> None:
    trial.env.reset(trial.seeds)
    try:
        pictures = trial.env.render()
    except RenderingUnavailableError:
        return
    num_envs = trial.env.num_envs
    good = pictures.ndim == 4 and pictures.shape[0] == num_envs and pictures.shape[-1] == 3
    actual = f"{list(pictures.shape)} {pictures.dtype}"
    _require(
        good and pictures.dtype == torch.uint8, f"render() gave {actual}; it must be [{num_envs}, H, W, 3] torch.uint8"
    )


def _check_close(trial: _Trial) -> None:
    env = trial.make()
    env.reset(trial.seeds)
    env.close()
    env.close()
    _require_refused(lambda: env.reset(trial.seeds), "reset after close")


def _first(mask: Tensor) -> int:
    return int(mask.nonzero()[0]) if bool(mask.any()) else -1


__all__ = ["ConformanceError", "EnvError", "check_env", "sample_actions"]
