"""What the engines `sglang` and `vllm` share, without either: answers, completions, arguments, capacity, errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf_workers.engines import serving
from rlinf_workers.engines.base import UnfinishedCompletion, not_begun
from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.completions import ServerAnswer, completions_of, joined
from rlinf_workers.engines.inside import BASE_S, answer_s
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.server_loop import with_hint
from rlinf_workers.engines.server_processes import last_error
from rlinf_workers.engines.serving import bound_cores
from rlinf_workers.engines.sglang import spec as sglang
from rlinf_workers.engines.sglang.server import EngineServer
from rlinf_workers.engines.vllm import spec as vllm
from rlinf_workers.engines.vllm.server import VLLMServer
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.roles.records.language import Prompt

SAMPLING = SamplingSettings(group_size=3, max_new_tokens=40)


def prompt(index: int = 0, length: int = 10) -> Prompt:
    return Prompt(index=index, token_ids=torch.arange(length), reference_answer="")


def request(index: int = 0, member: int = 0) -> UnfinishedCompletion:
    return not_begun(prompt(index), 3, NoiseKey(seed=4, step=2, index=index))[member]


def output(token_ids: list[int], reason: str, details: Any = None, **about: Any) -> ServerAnswer:
    logprobs = [-float(token) for token in token_ids]
    settings = {"logprobs": logprobs, "versions": [], **about}
    return ServerAnswer(token_ids=token_ids, reason=reason, details=details, **settings)


def answer(
    output: ServerAnswer, stop_ids: tuple[int, ...] = (1,), *, max_new_tokens: int = 40, is_suspended: bool = False,
    of: UnfinishedCompletion | None = None,
) -> Any:  # fmt: skip
    limits = {"max_new_tokens": max_new_tokens, "policy_version": 2, "is_suspended": is_suspended}
    return joined(of or request(), output, stop_ids, title="A server", **limits)


def test_an_answer_is_truncated_or_ends_with_a_stop_token_or_a_stop_string():
    ended, cut = answer(output([4, 1], "stop", 1)), answer(output([4, 5], "length"))
    of_string = answer(output([4, 5, 6], "length").up_to(2))
    assert [one.truncated for one in (ended, cut, of_string)] == [False, True, False]
    assert of_string.token_ids == [4, 5] and of_string.logprobs == [-4.0, -5.0]
    assert [(one.num_tokens, one.policy_version) for one in cut.segments] == [(2, 2)]


def test_an_answer_lists_which_version_sampled_which_tokens_after_those_before():
    versions = [(1, "default"), (9, "3")]
    whole = answer(output([4, 5, 6], "length", versions=versions))
    assert [(one.num_tokens, one.policy_version) for one in whole.segments] == [(1, -1), (2, 3)]
    ids, logprobs = torch.tensor([8, 9]), torch.tensor([-2.0, -3.0])
    before = replace(request(), token_ids=ids, logprobs=logprobs, segments=whole.segments[:1])
    continued = answer(output([4, 5], "length", versions=[(2, "3")]), of=replace(before, segments=()))
    assert continued.token_ids == [8, 9, 4, 5] and continued.logprobs == [-2.0, -3.0, -4.0, -5.0]


def test_a_suspended_request_is_unfinished_unless_its_last_token_ends_it():
    aborted = output([4, 5], "abort")
    unfinished = answer(aborted, is_suspended=True)
    assert isinstance(unfinished, UnfinishedCompletion)
    assert unfinished.token_ids.tolist() == [4, 5] and unfinished.logprobs.tolist() == [-4.0, -5.0]
    assert [(one.num_tokens, one.policy_version) for one in unfinished.segments] == [(2, 2)]
    assert answer(aborted, (5,), is_suspended=True).truncated is False
    assert answer(aborted, max_new_tokens=2, is_suspended=True).truncated is True
    assert len(answer(output([], "abort"), is_suspended=True).token_ids) == 0


@pytest.mark.parametrize(("reason", "details"), [("abort", "x"), ("stop", "NaN"), ("stop", 3), ("error", None)])
def test_a_request_that_ended_in_another_way_is_an_error(reason, details):
    with pytest.raises(ValueError, match=rf"prompt 6, completion 1: A server ended it with {reason} \({details}\)"):
        answer(output([4, 1], reason, details), of=request(6, 1))


def test_tokens_without_log_probabilities_are_an_error():
    with pytest.raises(ValueError, match="returned 1 log-probabilities of 2 tokens"):
        answer(replace(output([4, 5], "length"), logprobs=[-1.0]))


def test_completions_that_came_together_are_rows_of_one_record():
    answers = [
        answer(output([4, 5, 6], "length"), of=request(7, 2)),
        answer(output([4], "stop", 4), (4,), of=request(7, 0)),
        answer(output([5], "length"), of=request(8, 0)),
    ]
    whole, other = completions_of(answers)
    assert whole.members == (2, 0) and other.index == 8
    assert whole.token_ids.tolist() == [[4, 5, 6], [4, 0, 0]] and whole.loss_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert whole.logprobs.tolist() == [[-4.0, -5.0, -6.0], [-4.0, 0.0, 0.0]]
    assert whole.truncated.tolist() == [True, False]


def test_experts_of_completions_of_different_lengths_are_padded():
    experts = [torch.full((length - 1, 2, 2), length, dtype=torch.uint8) for length in (3, 1)]
    prompt_experts = torch.ones(10, 2, 2, dtype=torch.uint8)
    answers = [
        replace(answer(output(ids, "stop", 1), of=request(0, member)), experts=one, prompt_experts=prompt_experts)
        for member, (ids, one) in enumerate(zip(([5, 6, 1], [1]), experts, strict=True))
    ]
    (part,) = completions_of(answers)
    assert part.prompt_experts is prompt_experts and part.experts is not None
    assert part.experts.shape == (2, 2, 2, 2)
    assert part.experts[0].eq(3).all() and not part.experts[1].any()
    assert completions_of([answer(output([1], "stop", 1))])[0].experts is None


@pytest.mark.parametrize("spec", [sglang.SPEC, vllm.SPEC], ids=["sglang", "vllm"])
def test_a_version_without_a_name_that_is_imported_is_refused_with_those_that_have_it(spec, monkeypatch):
    monkeypatch.setattr(serving, "_version_of", lambda package: "9.9")
    text = rf"{spec.arguments.title} 9\.9 cannot be used: ImportError.*Missing.*Known to work: {spec.known_versions[0]}"
    with pytest.raises(SettingsRefused, match=text), serving.api_of(spec):
        from asyncio import Missing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]


def test_a_process_with_more_weights_has_more_time_to_answer(tmp_path):
    assert answer_s(0) == BASE_S and answer_s(15_000_000_000) == BASE_S + 150
    for name, size in (("model-1.safetensors", 300), ("model-2.safetensors", 41), ("config.json", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    assert serving.num_stored_bytes(tmp_path) == 341


@pytest.mark.parametrize(
    ("spec", "name", "says"),
    [
        (
            sglang.SPEC,
            "mem_fraction_statik",
            "no server argument of that name; did you mean mem_fraction_static?",
        ),
        (sglang.SPEC, "zzz", "launch_server --help"),
        (sglang.SPEC, "_private", "no server argument of that name"),
        (sglang.SPEC, "model_path", "the model and its dtype are those of the run"),
        (sglang.SPEC, "nccl_port", "sockets that it names itself"),
        (vllm.SPEC, "gpu_memory_utilisation", "did you mean gpu_memory_utilization"),
        (vllm.SPEC, "load_format", "weights come from the trainer"),
        (vllm.SPEC, "worker_extension_cls", "the worker starts, watches and ends"),
    ],
)
def test_names_that_no_recipe_may_set_are_refused(spec, name, says):
    """Also where the server's own names are read, not those of the list."""
    with pytest.raises(SettingsRefused, match=f"engine_options.{name}.*") as error:
        spec.arguments.check([name], [*spec.arguments.names, "_private"])
    assert says in str(error.value)
    assert [option for option, text in spec.problems({name: 1}) if says in text] == [name]


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        (sglang.SPEC, {"mem_fraction_static": 1}, ("mem_fraction_static", "=1 is not a fraction")),
        (vllm.SPEC, {"gpu_memory_utilization": 1}, None),
        (vllm.SPEC, {"gpu_memory_utilization": True}, ("gpu_memory_utilization", "=True is not a fraction")),
        (sglang.SPEC, {"chunked_prefill_size": -1}, None),
        (sglang.SPEC, {"max_total_tokens": -1}, ("max_total_tokens", "=-1 is not a number of at least 1")),
        (vllm.SPEC, {"max_num_seqs": 2.5}, ("max_num_seqs", "=2.5 is not a number of at least 1")),
        (vllm.SPEC, {"enforce_eager": 1}, ("enforce_eager", "=1 is neither true nor false")),
    ],
)
def test_values_that_no_server_takes_are_refused(spec, options, problem):
    problems = list(spec.problems(options))
    assert problems == [] if problem is None else problems[0][0] == problem[0] and problems[0][1].startswith(problem[1])


def test_each_process_on_cpu_slots_gets_the_core_of_its_slot():
    assert bound_cores(("cpu:2", "cpu:3"), range(8)) == "2|3"
    assert bound_cores(("cpu:2", "cpu:3"), (4, 6)) == "4|6"


def test_room_is_what_the_cache_holds_less_what_is_under_way():
    room = Capacity(1000, None)
    assert room.prompts(3) == 1  # nothing is known of prompts yet
    room.begin(prompt(0), SAMPLING)  # 10 + 3 * 20 tokens expected
    assert room.prompts(3) == (1000 - 70) // 70
    for member in range(3):
        room.end(0, member, 5)
    assert room.is_empty and room.prompts(3) == 1000 // (10 + 3 * 5)  # completions are as long as those that ended


def test_room_is_never_refused_to_a_prompt_alone_and_never_beyond_the_users_bound():
    room = Capacity(50, 4)
    room.begin(prompt(0), SAMPLING)
    assert room.prompts(3) == 0
    for member in range(3):
        room.end(0, member, 40)
    assert room.prompts(3) == 1
    room = Capacity(10**6, 4)
    room.begin(prompt(0), SAMPLING)
    assert room.prompts(1) == 1 and room.prompts(3) == 0
    room.end(0, 1, 4)
    assert room.prompts(1) == 2


def test_the_last_error_of_a_process_is_its_exception_without_the_stack(tmp_path):
    (tmp_path / "errors-5").write_text(
        "Scheduler hit an exception: Traceback (most recent call last):\n  File x, line 3\n    f(1)\n"
        "ValueError: too small\n"
        "  because\n\n"
    )
    assert last_error(tmp_path, 5) == "ValueError: too small\n  because"
    assert last_error(tmp_path) == last_error(tmp_path, 5) and last_error(tmp_path, 6) is None


def test_errors_of_servers_come_with_what_to_do_here():
    assert with_hint("RuntimeError: EADDRINUSE", EngineServer.HINTS).endswith(
        "another process took the port that SGLang had chosen; start the run again"
    )
    for server, error, option in (
        (EngineServer, "AssertionError: Memory pool size is too small", "max_total_tokens"),
        (VLLMServer, "ValueError: No available memory for the cache blocks.", "gpu_memory_utilization"),
    ):
        assert option in with_hint(error, server.HINTS)
    assert with_hint("ValueError: else", VLLMServer.HINTS) == "ValueError: else"
