"""The SFT warm-up of a reasoning run: supervised training on the task's own answers before the first step. All
policies that begin with the same model are trained on the same examples, so they are equal afterwards, and one of them
is kept for the next run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlinf.config.reasoning import ReasoningConfig, SftWarmUpConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import warmed_up_trainers
from rlinf.jobs.reasoning.prompts import PromptSource
from rlinf.jobs.sft_warm_ups import SftWarmUps, cache_folder
from rlinf_workers import Flow
from rlinf_workers.launchers import Interpreter

if TYPE_CHECKING:
    from rlinf.loop.session import Session


def prepare_sft_warm_up(
    session: Session,
    config: ReasoningConfig,
    prompts: PromptSource,
    flow: Flow,
    *,
    score: str,
    device: str,
    venvs: Mapping[str, Interpreter],
) -> None:
    """Trains until the task is solved with `target_accuracy`, or loads the identical SFT warm-up of an earlier run.

    Args:
        score: name of the metric that ends it.
        device: where the actor trains, `cpu` or `cuda`.
        venvs: as `Job.venvs`.
    """
    assert config.sft_warm_up is not None, "it has a flow"
    actor = session.group("actor")
    sft_warm_ups = SftWarmUps(config, num_ranks=actor.num_ranks, device=device, venvs=venvs)
    if (entry := sft_warm_ups.find()) is not None:
        folder, text = entry
        for trainer in warmed_up_trainers(config):
            session.group(trainer).call("load_checkpoint", str(folder))
        session.sync_weights()
        session.note(text)
    else:
        accuracy = _train(session, config, config.sft_warm_up, prompts, flow, score)
        _keep(session, config.name, sft_warm_ups, accuracy)


def _train(
    session: Session,
    config: ReasoningConfig,
    settings: SftWarmUpConfig,
    prompts: PromptSource,
    flow: Flow,
    score: str,
) -> float:
    """Returns the final score."""
    accuracy, step = 0.0, 0
    while step < settings.max_steps and accuracy < settings.target_accuracy:
        steps = range(step, min(step + settings.check_every, settings.max_steps))
        examples = [batch for s in steps for batch in prompts.examples(settings, s)]
        feeds = dict.fromkeys(warmed_up_trainers(config).values(), examples)
        run = session.run_flow(flow, step=0, feeds=feeds)
        step = steps.stop
        accuracy = session.evaluate(0)[score]
        session.message(f"SFT warm-up {step}: loss {run.metrics['sft_warm_up/loss']:.3f}, {score} {accuracy:.3f}")
    return accuracy


def _keep(session: Session, name: str, sft_warm_ups: SftWarmUps, accuracy: float) -> None:
    if sft_warm_ups.why_not is not None:
        session.note(f"SFT warm-up: made anew and not kept: {sft_warm_ups.why_not}")
        return
    try:
        digests: dict[str, str] = {}
        with sft_warm_ups.keeping(name, accuracy, digests) as folder:
            for of_rank in session.group("actor").call("save_checkpoint", str(folder)):
                digests.update(of_rank)
    except (OSError, UserError) as error:
        session.note(f"SFT warm-up: not kept for the next run: {error}")
    else:
        session.note(f"SFT warm-up: kept for the next run in {cache_folder()}")
