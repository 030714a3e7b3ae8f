"""Checks of an algorithm before any process starts: calls custom advantages and policy losses once on small synthetic
batches in the shapes of the actor, and reports settings that have no effect.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rlinf
import rlinf_algos
import rlinf_workers
from rlinf.errors import UserError
from rlinf_algos import (
    ADVANTAGES,
    BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES,
    POLICY_LOSSES,
    Algorithm,
    check_finite,
    filled,
)
from rlinf_workers import AdvantagePart, PolicyLossPart

NUM_TOKENS = 6
"""Tokens of the longest completion, or steps of a segment, that a function is tried on."""
OWN_FOLDERS = tuple(str(Path(module.__file__ or "").parent) for module in (rlinf, rlinf_algos, rlinf_workers, torch))
TIME_LIMIT_S = 60.0
"""Within this a function has to come back, as a reward has to."""
SEE = "see docs/algorithms/custom.md"


def idle_notes(algorithm: Algorithm) -> tuple[str, ...]:
    """The numbers that were chosen for an algorithm, other than its preset's, and have no effect."""
    usual = filled(algorithm.name, {"samples": algorithm.samples, "policy_loss": algorithm.policy_loss})
    chosen = {item.name: getattr(algorithm, item.name) for item in fields(algorithm)} | {**algorithm.options}
    names = [name for name in algorithm.idle_fields if chosen[name] != {**usual, **usual["options"]}.get(name)]
    if not names:
        return ()
    keys = ", ".join(f"algorithm.{name if name in Algorithm.__slots__ else f'options.{name}'}" for name in names)
    have = "have" if len(names) > 1 else "has"
    return (
        f"{keys} {have} no effect: with one optimizer step a batch the probability ratio is 1; "
        "algorithm.num_minibatches or algorithm.num_epochs above 1 make several",
    )


def try_algorithm(algorithm: Algorithm, *, num_parts: int = 0) -> None:
    """Calls a custom advantage and policy loss, so that mistakes show before a process starts.

    Args:
        num_parts: terms of a weighted reward; 0: the reward has none.

    Raises: UserError with the place in the function where it failed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if algorithm.advantage not in BUILTIN_ADVANTAGES:
            _watched(f"algorithm.advantage={algorithm.advantage}", lambda: _try_advantage(algorithm, num_parts))
        if algorithm.policy_loss not in BUILTIN_POLICY_LOSSES:
            _watched(f"algorithm.policy_loss={algorithm.policy_loss}", lambda: _try_policy_loss(algorithm))


def _watched(what: str, trial: Callable[[], None]) -> None:
    """Makes a trial in a thread, which is left behind where the function hangs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            trial()
        except (UserError, KeyboardInterrupt) as error:  # raised below, in the thread that the command runs in
            errors.append(error)

    thread = threading.Thread(target=run, name="trial", daemon=True)
    thread.start()
    thread.join(TIME_LIMIT_S)
    if thread.is_alive():
        stack = traceback.extract_stack(sys._current_frames().get(thread.ident or 0))
        raise UserError(f"{what} did not return within {TIME_LIMIT_S:g} s; it is at{_places(stack)}", hint=SEE)
    if errors:
        raise errors[0]


def _try_advantage(algorithm: Algorithm, num_parts: int) -> None:
    part = AdvantagePart(algorithm)
    what, function = f"algorithm.advantage={algorithm.advantage}", ADVANTAGES.get(algorithm.advantage)
    for rewards, kind in ((torch.arange(algorithm.group_size) % 2.0, ""), (torch.ones(algorithm.group_size), "equal ")):
        tensors = _inputs_of_advantage(algorithm, part.takes.works_on, rewards, num_parts)
        inputs = {name: tensors[name] for name in part.takes.inputs}
        shape = next(iter(inputs.values())).shape[:2]
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
        with _refusing(what, f"called once with {kind}{shapes}", function):
            advantages, returns = part(tensors, shape)
            check_finite("the advantages", advantages, tensors.get("loss_mask", torch.ones(shape)).bool())
            if "values" in inputs and returns is None:
                raise TypeError("it reads values and gave no returns; return the pair (advantages, returns)")
            if returns is not None and returns.shape != shape:
                raise ValueError(f"its returns have the shape {list(returns.shape)} for rewards {list(shape)}")


def _inputs_of_advantage(algorithm: Algorithm, works_on: str, rewards: Tensor, num_parts: int) -> Mapping[str, Tensor]:
    """By the names of `rlinf_algos.parts.INPUTS`."""
    size = len(rewards)
    if works_on == "groups":
        parts = rewards[None, :, None] * torch.linspace(1.0, 0.5, max(1, num_parts))
        lengths = torch.arange(1, size + 1).clamp(max=NUM_TOKENS)[None]
        return {
            "rewards": rewards[None],
            "lengths": lengths,
            "parts": parts,
            "part_weights": torch.ones(parts.shape[2]),
        }
    if works_on == "tokens":
        mask = _ragged(size)
        is_last = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        norms = torch.full(mask.shape, 0.5) * mask
        return {"rewards": rewards[:, None] * is_last, "loss_mask": mask, "values": norms, "logit_norms": norms}
    ends = torch.zeros(NUM_TOKENS, size, dtype=torch.bool)
    ends[-1] = True
    values = torch.full(ends.shape, 0.5)
    steps = {"rewards": rewards.expand(ends.shape).clone(), "values": values, "next_values": values}
    return steps | {"terminated": ends, "truncated": ~ends & False, "state_ids": ends.long()}


def _try_policy_loss(algorithm: Algorithm) -> None:
    part = PolicyLossPart(algorithm)
    what, function = f"algorithm.policy_loss={algorithm.policy_loss}", POLICY_LOSSES.get(algorithm.policy_loss)
    mask = _ragged(4)
    policy = (-0.1 - torch.rand(mask.shape)) * mask
    by_sequence = algorithm.samples == "completions" and AdvantagePart(algorithm).takes.works_on == "groups"
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0])
    advantages = advantages if by_sequence else advantages[:, None].expand(mask.shape).clone()
    for moved, kind in ((0.0, "of the proximal policy itself"), (0.2, "after an optimizer step")):
        free = policy.clone().requires_grad_()
        proximal = (policy - moved * torch.randn(mask.shape)) * mask
        shapes = f"log-probabilities {list(mask.shape)} {kind} and advantages {list(advantages.shape)}"
        with _refusing(what, f"called once with {shapes}", function):
            terms = part(free, proximal, proximal, advantages, mask).terms
            check_finite("loss_terms", terms, mask.bool())
            if not terms.requires_grad:
                raise TypeError("its loss_terms have no gradient; they must depend on policy_logprobs")
            (gradient,) = torch.autograd.grad(terms.sum(), free, allow_unused=True)
            if gradient is None:
                raise TypeError("its loss_terms do not depend on policy_logprobs, so nothing is learned")
            check_finite("the gradient for policy_logprobs", gradient, mask.bool())


def _ragged(num_rows: int) -> Tensor:
    """[num_rows, NUM_TOKENS] float32, completions of 1 to NUM_TOKENS tokens."""
    lengths = NUM_TOKENS - torch.arange(num_rows) % NUM_TOKENS
    return (torch.arange(NUM_TOKENS) < lengths[:, None]).float()


@contextmanager
def _refusing(what: str, about: str, function: Callable[..., Any]) -> Iterator[None]:
    """Turns what a function of the user's raises, or what is wrong with its result, into a UserError."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a function of the user's may raise what it likes
        name = "" if type(error).__module__.startswith("rlinf") else f"{type(error).__name__}: "
        raise UserError(f"{what}, {about}: {name}{error}{_place(error, function)}", hint=SEE) from error


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Where in the user's code an error comes from; for a wrong result, where the function begins."""
    if places := _places(traceback.extract_tb(error.__traceback__)):
        return places
    code = getattr(function, "__code__", None)
    return "" if code is None else f"\n  {code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _places(stack: traceback.StackSummary) -> str:
    """The user's part of a stack, the last three calls of it."""
    theirs = [frame for frame in stack if not frame.filename.startswith((*OWN_FOLDERS, threading.__file__))]
    return "".join(f"\n  {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in theirs[-3:])
