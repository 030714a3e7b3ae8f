"""Sessions keep tokens as they were served, and say where a request did not continue them."""

import asyncio

import pytest
from workers_sessions import ADD, CALL, LIMITS, Script, chatml_session, plain_template, texts

from rlinf_workers.agents.messages import RequestRefused, read_messages
from rlinf_workers.agents.pictures import part_of
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import AgentSession, ContextFull, SessionLimits, TurnsExhausted

ASK = [{"role": "user", "content": "2 + 3?"}]


def chat(session, messages, **arguments):
    return asyncio.run(session.chat(messages, **arguments))


def rendering(session, messages, tools=()):
    """Tokens of a rendering of the whole conversation, the reference."""
    template = session.template
    return template.text.encode(template.renderer.render(read_messages(messages), tools, opens_turn=True))


def test_a_second_request_has_the_tokens_of_the_first_as_they_were_served():
    session, script = chatml_session([CALL, "Five."])
    (turn,) = chat(session, ASK, tools=[ADD])
    call = turn.tool_calls[0]
    assert (call.name, call.values, turn.finish_reason) == ("add", {"a": 2, "b": 3}, "tool_calls")
    history = [*ASK, turn.message(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    (last,) = chat(session, history, tools=[ADD])
    assert script.prompts[1] == rendering(session, history, [ADD])
    assert session.trajectory().token_ids(last.node) == script.prompts[1] + script.served[1].token_ids
    assert [node.differs for node in session.trajectory().nodes] == [""] * len(texts(session))


def test_each_token_has_its_author():
    session, _ = chatml_session([CALL, "Five."])
    (turn,) = chat(session, ASK, tools=[ADD])
    result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "5 exactly"}
    chat(session, [*ASK, turn.message(), result], tools=[ADD])
    authors = [(author, text) for author, text, _ in texts(session)]
    assert authors[1:] == [
        ("user", "2 + 3?"),
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
        ("policy", CALL + "<|im_end|>"),
        ("template", "\n<|im_start|>user\n<tool_response>\n"),
        ("tool", "5 exactly"),
        ("template", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("policy", "Five.<|im_end|>"),
    ]


def test_tokens_that_a_rendering_would_merge_stay_as_served():
    session, script = chatml_session(["one"])
    template = session.template
    (turn,) = chat(session, ASK)
    served = script.served[0]
    assert served.token_ids == template.text.encode("one<|im_end|>")
    session, script = chatml_session(["x", "y"])
    apart = [token for letter in "the" for token in template.text.encode(letter)]
    assert apart != template.text.encode("the")
    original = script.sample

    async def sample(*arguments, **named):
        one = await original(*arguments, **named)
        return type(one)(token_ids=[*apart, one.token_ids[-1]], logprobs=[0.0] * 4, versions=[(4, 1)])

    script.sample = sample
    (turn,) = chat(session, ASK)
    assert turn.content == "the"
    chat(session, [*ASK, turn.message(), {"role": "user", "content": "?"}])
    begin = len(script.prompts[0])
    assert script.prompts[1][begin : begin + 3] == apart


def test_a_turn_that_was_cut_off_gets_its_end_from_the_template():
    session, script = chatml_session(["It is...", "ok"])
    (turn,) = chat(session, ASK)
    assert turn.finish_reason == "length"
    history = [*ASK, turn.message(), {"role": "user", "content": "go on"}]
    chat(session, history)
    assert script.prompts[1] == rendering(session, history)
    assert texts(session)[4][:2] == ("template", "<|im_end|>\n<|im_start|>user\n")


def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it():
    session, script = chatml_session(["one, two, three", "ok"])
    (turn,) = chat(session, ASK, stop=[", t"])
    text = session.template.text.decode(turn.token_ids)
    assert (turn.content, turn.finish_reason, turn.stop) == ("one", "stop", ", t")
    assert text.startswith("one, t") and "wo" not in text
    assert len(turn.logprobs) == len(turn.token_ids) == sum(number for number, _ in turn.versions)
    chat(session, [*ASK, turn.message(), {"role": "user", "content": "go on"}])
    assert session.template.text.decode(script.prompts[1]).endswith(
        text + "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_edited_history_branches_at_the_deepest_turn_that_agrees_and_says_what_differs():
    session, script = chatml_session([CALL, "Five.", "Six."])
    (turn,) = chat(session, ASK, tools=[ADD])
    result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "5 exactly"}
    history = [*ASK, turn.message(), result]
    chat(session, history, tools=[ADD])
    edited = [*history[:2], {**result, "content": "5 about"}]
    (last,) = chat(session, edited, tools=[ADD])
    trajectory = session.trajectory()
    assert script.prompts[2] == rendering(session, edited, [ADD])
    assert turn.node in trajectory.path(last.node)
    (differs,) = [node.differs for node in trajectory.nodes if node.differs]
    assert differs == "message 2 (tool): content differs at character 2: 'exactly' became 'about'"
    assert session.counts["branches"] == 1 and len(trajectory.leaves()) == 2


def test_a_compressed_history_begins_a_new_tree_and_says_what_differs():
    session, _ = chatml_session(["a", "b", "c"])
    (turn,) = chat(session, ASK)
    chat(session, [*ASK, turn.message(), {"role": "user", "content": "and?"}])
    (last,) = chat(session, [{"role": "user", "content": "Summary: it was a."}])
    trajectory = session.trajectory()
    assert turn.node not in trajectory.path(last.node)
    (differs,) = [node.differs for node in trajectory.nodes if node.differs]
    assert differs.startswith("message 0 (user): content differs at character 0: '2 + 3?' became 'Summary")


def test_samples_of_one_request_share_their_history_and_have_seeds_of_their_own():
    session, script = chatml_session(["a", "b", "c"])
    turns = chat(session, ASK, n=3, seed=5)
    nodes = session.trajectory().nodes
    assert len({nodes[turn.node].parent for turn in turns}) == 1
    assert script.seeds == [5, 6, 7]
    assert [turn.content for turn in turns] == ["a", "b", "c"]


def test_the_same_request_again_adds_no_tokens_but_those_of_the_turn():
    session, _ = chatml_session(["a", "b"])
    chat(session, ASK)
    before = len(session.trajectory().nodes)
    chat(session, ASK)
    assert len(session.trajectory().nodes) == before + 1
    assert not any(node.differs for node in session.trajectory().nodes)


def test_arguments_that_a_harness_spaces_differently_still_continue():
    session, _ = chatml_session([CALL, "Five."])
    (turn,) = chat(session, ASK, tools=[ADD])
    message = turn.message()
    message["tool_calls"][0]["function"]["arguments"] = '{"b":3,"a":2}'
    (last,) = chat(session, [*ASK, message, {"role": "tool", "content": "5"}], tools=[ADD])
    assert turn.node in session.trajectory().path(last.node)


def test_a_malformed_call_is_content_and_says_what_is_wrong():
    session, _ = chatml_session(["<tool_call>\n{'name'}\n</tool_call>"])
    (turn,) = chat(session, ASK, tools=[ADD])
    assert turn.content == "<tool_call>\n{'name'}\n</tool_call>"
    assert turn.tool_calls[0].malformed.startswith("it is no JSON") and turn.finish_reason == "stop"
    assert "tool_calls" not in turn.message() and session.counts["malformed_calls"] == 1


def test_limits_end_the_episode_with_their_cause():
    session, _ = chatml_session(["a", "b"], limits=SessionLimits(max_turns=1, max_context_tokens=999, max_new_tokens=9))
    (turn,) = chat(session, ASK)
    with pytest.raises(TurnsExhausted, match="all 1 turns") as caught:
        chat(session, [*ASK, turn.message(), *ASK])
    assert caught.value.cause == "turns"
    with pytest.raises(TurnsExhausted):
        session.raise_end()
    session, _ = chatml_session(["a"], limits=SessionLimits(max_turns=None, max_context_tokens=9, max_new_tokens=9))
    with pytest.raises(ContextFull, match="at most 9 fit") as caught:
        chat(session, ASK)
    assert caught.value.cause == "tokens"


def test_a_turn_may_only_use_what_is_left_of_the_context():
    template_session, _ = chatml_session([])
    used = len(rendering(template_session, ASK))
    limits = SessionLimits(max_turns=None, max_context_tokens=used + 40, max_new_tokens=50)
    session, script = chatml_session(["a", "b"], limits=limits)
    chat(session, ASK)
    chat(session, ASK, max_tokens=7)
    assert script.limits == [40, 7]


def test_a_turn_that_was_not_served_does_not_count():
    limits = SessionLimits(max_turns=1, max_context_tokens=999, max_new_tokens=9)
    session, _ = chatml_session([EpisodeEnded("engine_lost"), "a"], limits=limits)
    with pytest.raises(EpisodeEnded):
        chat(session, ASK)
    assert len(chat(session, ASK)) == 1


def test_rewards_and_states_belong_to_turns():
    session, _ = chatml_session(["a", "b"])
    session.next_state = "room 1"
    (turn,) = chat(session, ASK)
    (other,) = chat(session, [*ASK, turn.message(), *ASK])
    session.reward_turn(turn, 0.5)
    session.reward_numbered_turn(-1, 2.0)
    nodes = session.trajectory(reward=1.0).nodes
    assert [(nodes[one.node].reward, nodes[one.node].state) for one in (turn, other)] == [(0.5, "room 1"), (2.0, "")]
    with pytest.raises(RequestRefused, match="no turn 2"):
        session.reward_numbered_turn(2, 1.0)


def test_completions_continue_the_text_that_they_returned():
    template = plain_template()
    script = Script(template, ["b", "d"], end="<end>")
    session = AgentSession("s", template, script, LIMITS)
    (turn,) = asyncio.run(session.complete("a"))
    (other,) = asyncio.run(session.complete("a" + turn.content + "c"))
    assert [(author, text) for author, text, _ in texts(session)] == [
        ("user", "a"),
        ("policy", "b<end>"),
        ("user", "c"),
        ("policy", "d<end>"),
    ]
    assert turn.node in session.trajectory().path(other.node)


def test_completions_of_tokens_continue_the_longest_path():
    template = plain_template()
    script = Script(template, ["b", "d"], end="<end>")
    session = AgentSession("s", template, script, LIMITS)
    (turn,) = asyncio.run(session.complete([5, 6]))
    (other,) = asyncio.run(session.complete([5, 6, *turn.token_ids, 7]))
    assert turn.node in session.trajectory().path(other.node)
    assert script.prompts[1] == [5, 6, *turn.token_ids, 7]


def test_a_plain_model_calls_a_tool_in_brackets_and_reads_the_result_in_braces():
    template = plain_template()
    script = Script(template, ["[calc:2+3]", "5"], end="<end>")
    session = AgentSession("s", template, script, LIMITS)
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"properties": {"x": {"type": "string"}}}}}
    (turn,) = chat(session, [{"role": "user", "content": "2+3="}], tools=[tool])
    call = turn.tool_calls[0]
    assert (call.name, call.values) == ("calc", {"x": "2+3"})
    history = [{"role": "user", "content": "2+3="}, turn.message(), {"role": "tool", "content": "5"}]
    chat(session, history, tools=[tool])
    assert template.text.decode(script.prompts[1]) == "2+3=[calc:2+3]<end>{5}"


def test_without_a_chat_template_a_request_cannot_end_with_the_assistants_message_either():
    template = plain_template()
    session = AgentSession("s", template, Script(template, ["4", "5"], end="<end>"), LIMITS)
    task = {"role": "user", "content": "2+3="}
    (turn,) = chat(session, [task])
    with pytest.raises(RequestRefused, match="the last message is the assistant's"):
        chat(session, [task, turn.message()])  # its tokens would be encoded again, as the user's


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ([{"role": "boss", "content": "x"}], r"messages\[0\].role='boss' is not one of"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\[0\].content\[0\] is of type 'audio'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]: the picture has no URL"),
        (
            [{"role": "user", "content": [part_of(b"")]}],
            r"content has a picture, and the model reads text",
        ),
        ([*ASK, {"role": "assistant", "content": "It"}], "the last message is the assistant's"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(messages, problem):
    session, _ = chatml_session(["a"])
    with pytest.raises(RequestRefused, match=problem):
        chat(session, messages)
    assert session.trajectory().nodes == []
