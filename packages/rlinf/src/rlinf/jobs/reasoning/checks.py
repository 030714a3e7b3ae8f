"""The checks of a reasoning job's inputs, in order. Each raises UserError or returns notes.

The parts of a job are created when they are first read, and raise UserError where they cannot be created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlinf.config.devices import device_kind, make_cluster
from rlinf.config.inputs import check_model_folder
from rlinf.config.rewards import BySourceRewardConfig
from rlinf.errors import UserError
from rlinf.jobs.agents import check_agent, refuse_other_models
from rlinf.jobs.algorithms import idle_notes, try_algorithm
from rlinf.jobs.generation import check_engine, check_installed
from rlinf.jobs.models import (
    architecture_refusal,
    check_architecture,
    check_end_tokens,
    code_notes,
    config_of,
    engine_ways,
    refuse_blind_trainer,
    refuse_videos_of_agents,
    trainer_ways,
)
from rlinf.jobs.named_agents import check_partners
from rlinf.jobs.reasoning.memory import cut_refusal, quantization_refusal, recompute_notes, with_actor, with_budget_on
from rlinf.jobs.rewards import blind_judges, check_reward
from rlinf.jobs.training import backend_settings
from rlinf.run_folder.checkpoints import refuse_damaged_model
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import load_checkpoint_tokenizer, max_positions
from rlinf_workers.models import VISION_LANGUAGE, has_balanced_routers, has_routers
from rlinf_workers.plugins import ENGINES

if TYPE_CHECKING:
    from rlinf.jobs.reasoning.job import ReasoningJob


def model_files(job: ReasoningJob) -> None:
    """The model's files are complete and undamaged."""
    path = job.config.model.path
    if path is not None:
        check_model_folder(path)
        refuse_damaged_model(path, key="model.path")


def engine(job: ReasoningJob) -> None:
    check_engine(job.config.rollout, "rollout.engine")
    on_gpu = device_kind(job.config.cluster, job.machine) == "cuda"
    if refusal := quantization_refusal(job.config, None, on_gpu=on_gpu):
        raise refusal


def reward(job: ReasoningJob) -> Sequence[str]:
    return check_reward(job.config.reward)


def tokenizer(job: ReasoningJob) -> Sequence[str]:
    """The data files can be read, and completions of the model can end."""
    path, own = job.config.model.path, job.prompts.tokenizer
    return () if path is None else (*code_notes(path), *check_end_tokens(path, own))


def algorithm(job: ReasoningJob) -> None:
    num_parts = len(job.config.reward.terms) if job.config.reward.kind == "weighted" else 0
    try_algorithm(job.config.algorithm, num_parts=num_parts)


def backend(job: ReasoningJob) -> None:
    """The trainer accepts its options and can hold the model."""
    _ = job.backend


def micro_batches(job: ReasoningJob) -> Sequence[str]:
    """Settles `actor.max_tokens_per_micro_batch: auto`: a number of tokens on GPUs, padded micro-batches on CPU slots;
    and on GPUs whether activations are recomputed, where that is open. Notes why micro-batches are padded on GPUs, or
    activations recomputed."""
    config, folder = job.config, job.config.model.path
    cluster, reason = make_cluster(config.cluster, job.machine), None
    is_open, on_gpu = config.actor.max_tokens_per_micro_batch == "auto", cluster.devices[0].kind == "cuda"
    if is_open and on_gpu and config.actor.trainer_spec.packs_sequences:
        if job.shape is None:
            reason = "its memory cannot be counted"
        elif folder is not None:
            longest = config.rollout.max_sequence_tokens
            reason = architecture_refusal(folder, trainer_ways(config.actor, packs=True), num_tokens=longest)
    pads = is_open and (reason is not None or not on_gpu or not config.actor.trainer_spec.packs_sequences)
    job.config = chosen = with_actor(config, max_tokens_per_micro_batch=None) if pads else config
    if on_gpu and job.shape is not None:
        job.config = with_budget_on(chosen, job.shape, cluster)
    notes = recompute_notes(chosen, job.config)
    if reason is not None:
        notes.append(
            f"actor.max_tokens_per_micro_batch=auto: micro-batches are padded, since the model cannot pack: {reason}"
        )
    return notes


def routers(job: ReasoningJob) -> None:
    """Only a mixture of experts has a load-balancing loss, and experts to replay."""
    _check_routers(job, job.model_config)


def _check_routers(job: ReasoningJob, model_config: Mapping[str, Any]) -> None:
    kind, coef = str(model_config.get("model_type")), job.config.algorithm.router_aux_coef
    if coef and not has_balanced_routers(kind):
        raise UserError(
            f"algorithm.router_aux_coef={coef:g}: {kind} is no mixture of experts whose routers have a "
            "load-balancing loss",
            hint="leave it out",
        )
    if job.config.actor.router_replay and not has_routers(kind):
        raise UserError(
            f"actor.router_replay=true: {kind} is no mixture of experts whose choices can be replayed",
            hint="leave it out",
        )


def pictures(job: ReasoningJob) -> None:
    """What generates and trains a vision-language model supports pictures."""
    config, kind = job.config, job.model_config.get("model_type")
    if kind not in VISION_LANGUAGE:
        if config.actor.freeze_vision_tower:
            raise UserError(f"actor.freeze_vision_tower=true: {kind} has no vision tower", hint="leave it out")
        return
    if config.actor.freeze_vision_tower and config.actor.lora is not None:
        raise UserError(
            "actor.freeze_vision_tower=true: actor.lora trains the layers that its targets name",
            hint="leave it out, and name layers of the decoder: --actor.lora.targets q_proj,k_proj,v_proj,o_proj",
        )
    engine = config.rollout.engine_spec
    if kind not in engine.picture_models:
        others = [spec.name for spec in ENGINES.specs() if kind in spec.picture_models]
        raise UserError(
            f"rollout.engine={engine.name}: does not support pictures of {kind}",
            hint=f"use --rollout.engine {' or '.join(others)}",
        )
    if problem := engine.pictures_problem(config.rollout.engine_options, str(kind)):
        raise UserError(f"rollout.engine={engine.name} does not support pictures, and {kind} reads them: {problem}")
    refuse_blind_trainer(config.actor, str(kind))
    if config.rollout.agent is not None:
        refuse_other_models(config.rollout.agent, str(kind), "rollout.")


def further_policies(job: ReasoningJob) -> None:
    """The trainer can hold the models that further policies begin with, and computes them as transformers does."""
    config, ways = job.config, _trainer_ways(job)
    begun = {path for path in config.rollout.further_policies.values() if path is not None}
    for key, path in config.model_paths.items():
        if path not in begun or not key.startswith("rollout."):
            continue
        model_config = config_of(path)
        backend_settings(config.actor, config.actor.resolved_shards, model_config)
        _check_routers(job, model_config)
        check_architecture(path, ways, num_tokens=config.rollout.max_sequence_tokens, key=key)


def _trainer_ways(job: ReasoningJob) -> tuple[str, ...]:
    actor = job.config.actor
    return trainer_ways(actor, packs=actor.token_budget is not None)


def adapter(job: ReasoningJob) -> None:
    """The backend can train adapters, and the targets are layers of the models."""
    _ = job.loras


def teacher(job: ReasoningJob) -> None:
    """The reference reads the actor's token ids, so both need the same tokenizer."""
    path = job.config.reference.path
    if path is None:
        return
    check_model_folder(path, key="reference.path")
    own = job.prompts.tokenizer.get_vocab()
    theirs = load_checkpoint_tokenizer(path, "reference.path").get_vocab()
    if own != theirs:
        differing = sorted(own.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
        raise UserError(
            f"reference.path={path}: its tokenizer is not the actor's: {len(theirs)} tokens against {len(own)}, "
            f"and the first that differs is {differing[0][0]!r} with the id {differing[0][1]}",
            hint="a teacher judges the actor's token ids; use one of the same family",
        )


def prompts(job: ReasoningJob) -> Sequence[str]:
    """The prompts fit; notes their format and problems that a step repeats."""
    task, encoder, notes = job.config.task, job.prompts.encoder, []
    if task.kind == "files" and task.prompt_format == "auto":
        notes.append(f"task.prompt_format=auto: {encoder.describe()}")
    problems = job.prompts.task
    if isinstance(problems, FileProblems) and job.num_items > (num_problems := problems.num_train_problems):
        notes.append(
            f"a step asks {job.num_items} prompts, and task.train_files hold {num_problems} problems: each is asked "
            f"{job.num_items / num_problems:.3g} times a step; use --rollout.num_prompts {num_problems} or less to "
            "ask each once"
        )
    return (*notes, *problems.notes)


def videos(job: ReasoningJob) -> None:
    """Agents get no videos."""
    task = job.prompts.task
    if isinstance(task, FileProblems) and job.config.rollout.agent is not None:
        refuse_videos_of_agents(task.all_problems())


def rewards_that_see(job: ReasoningJob) -> Sequence[str]:
    """Notes that a judge does not see the pictures of the problems."""
    if not job.prompts.task.train_problem(0).pictures or job.prompts.tried_reward.reads_pictures:
        return ()
    return blind_judges(job.config.reward)


def sources(job: ReasoningJob) -> None:
    """Every row has a source with a reward."""
    reward, problems = job.config.reward, job.prompts.task
    if not isinstance(reward, BySourceRewardConfig):
        return
    rows = problems.all_problems() if isinstance(problems, FileProblems) else iter(job.prompts.held_out[""])
    for problem in rows:
        if (source := problem.row.get(reward.column)) not in reward.sources:
            raise UserError(
                f"reward.sources: {problem.place or 'a problem'} has {reward.column}={source!r}, which has no reward; "
                f"known sources: {', '.join(reward.sources)}",
                hint="add it to reward.sources; task.eval_source names the source of eval_files",
            )


def settings_without_effect(job: ReasoningJob) -> Sequence[str]:
    on_gpu = device_kind(job.config.cluster, job.machine) == "cuda"
    return (*idle_notes(job.config.algorithm), *job.config.actor.trainer_spec.notes(on_gpu=on_gpu))


def positions(job: ReasoningJob) -> None:
    """The sequences are not longer than the model supports."""
    rollout, folder = job.config.rollout, job.config.model.path
    num_tokens = rollout.max_sequence_tokens
    limit = None if folder is None else max_positions(folder)
    if limit is not None and num_tokens > limit:
        raise UserError(
            f"{rollout.max_sequence_key} = {num_tokens}, but model.path={folder} was made "
            f"for {limit} positions (max_position_embeddings of its config.json)",
            hint=f"use --rollout.max_new_tokens {max(1, limit - rollout.max_prompt_tokens)}, for example",
        )


def partners(job: ReasoningJob) -> Sequence[str]:
    """The models of partners and further policies can be loaded and continued."""
    rollout = job.config.rollout
    if rollout.agent is None:
        return ()
    ways = engine_ways(rollout, on_gpu=device_kind(job.config.cluster, job.machine) == "cuda")
    return check_partners(rollout.agent, job.config.chat_options, ways, "rollout.")


def generated_prompts(job: ReasoningJob) -> None:
    """Prompts of a generated task fit when a model's own tokenizer encodes them."""
    config, limit = job.config, job.config.rollout.max_prompt_tokens
    problems = job.prompts.held_out[""]
    if config.model.path is None or config.task.kind == "files":
        return
    longest = max(job.prompts.encoder.num_tokens(problems))
    if longest > limit:
        raise UserError(
            f"rollout.max_prompt_tokens={limit}, and prompts of task.kind={config.task.kind} have up to "
            f"{longest} tokens of this model",
            hint=f"use --rollout.max_prompt_tokens {longest} or more",
        )


def architectures(job: ReasoningJob) -> None:
    """Rollout, actor and reference compute the same outputs as transformers."""
    config, folder = job.config, job.config.model.path
    if folder is None:
        return
    num_tokens = config.rollout.max_sequence_tokens
    on_gpu = device_kind(config.cluster, job.machine) == "cuda"
    trained = _trainer_ways(job)
    replay = ("replay",) if config.actor.router_replay else ()
    ways = (*engine_ways(config.rollout, on_gpu=on_gpu), *trained, *replay)
    check_architecture(folder, ways, num_tokens=num_tokens)
    if config.reference.path is not None and config.has_reference_worker:
        check_architecture(config.reference.path, trained, num_tokens=num_tokens, key="reference.path")


def score_to_stop_at(job: ReasoningJob) -> Sequence[str]:
    """Notes that `run.stop_at_score` is a mean reward; calls a custom reward once to find out."""
    limit = job.config.run.stop_at_score
    if job.prompts.tried_reward.judges or limit is None:
        return ()
    return (f"run.stop_at_score={limit:g} is compared with the mean reward, which is the score of this run",)


def cuts(job: ReasoningJob) -> None:
    """Engines can split the model across their devices."""
    if job.shape is not None and (refusal := cut_refusal(job.config, job.shape)):
        raise refusal


def installed(job: ReasoningJob) -> None:
    """The engine's package is installed where the rollout runs."""
    check_installed(job.config.rollout, job.venvs.get("rollout"))


def agent(job: ReasoningJob) -> None:
    """What the agent is made of can be used, and the model's chat template can be continued token by token."""
    config = job.config
    if config.rollout.agent is not None:
        check_agent(config.rollout.agent, config.chat_options, config.model.path, at="rollout.", model_key="model.path")


CHECKS: tuple[Callable[[ReasoningJob], Sequence[str] | None], ...] = (
    model_files,
    engine,
    reward,
    tokenizer,
    algorithm,
    micro_batches,
    backend,
    routers,
    pictures,
    adapter,
    teacher,
    partners,
    further_policies,
    prompts,
    videos,
    rewards_that_see,
    sources,
    settings_without_effect,
    positions,
    generated_prompts,
    architectures,
    score_to_stop_at,
    cuts,
    installed,
    agent,
)
