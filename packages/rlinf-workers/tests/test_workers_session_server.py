"""Agents that were written for OpenAI's and Anthropic's SDKs run unchanged against the session server."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI, BadRequestError, RateLimitError
from workers_sessions import ADD, CALL, LIMITS, Script, chatml_template, plain_template

from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.server import ServerLimits, SessionServer
from rlinf_workers.agents.sessions import AgentSession, SessionLimits

ASK: Any = [{"role": "user", "content": "2 + 3?"}]
RESULT = "It is 5, and some more text so that a stream has several pieces. 六"


def run(replies, play, *, template=None, limits=LIMITS, server_limits=None, delay_s=0.0, agents=()):
    """Serves a session that answers with `replies`, and runs `await play(base_url, token, session, script)`."""

    async def main():
        served = template or chatml_template()
        end = "<end>" if template else "<|im_end|>"
        script = Script(served, replies, end=end, delay_s=delay_s)
        session = AgentSession("a/b 1", served, script, limits, agents=dict.fromkeys(agents, served))
        server = SessionServer(limits=server_limits)
        await server.start()
        try:
            base_url, token = server.open(session)
            return await play(base_url, token, session, script)
        finally:
            await server.stop()

    return asyncio.run(main())


def assert_trained_tokens_are_the_served_ones(session, script):
    """Against what the engine returned, in order; and every prompt is the path to its turn."""
    trajectory = session.trajectory()
    turns = [index for index, node in enumerate(trajectory.nodes) if node.author == "policy"]
    assert len(turns) == len(script.served)
    for index, prompt, sampled in zip(turns, script.prompts, script.served, strict=True):
        assert trajectory.nodes[index].sampled == sampled
        assert trajectory.token_ids(index) == prompt + sampled.token_ids


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_openai_chat_calls_a_tool_and_answers(streams):
    async def turn(client, messages):
        if not streams:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
            return answer.choices[0].message, answer.choices[0].finish_reason
        async with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_completion()
        return answer.choices[0].message, answer.choices[0].finish_reason

    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            messages = list(ASK)
            message, reason = await turn(client, messages)
            assert (message.content, reason) == ("Let me see.", "tool_calls")
            values = json.loads(message.tool_calls[0].function.arguments)
            assert (message.tool_calls[0].function.name, values) == ("add", {"a": 2, "b": 3})
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"})
            message, reason = await turn(client, messages)
            assert (message.content, reason) == (RESULT, "stop")
        assert session.counts["continued"] == 1 and not session.counts["branches"] and not session.counts["roots"]
        assert_trained_tokens_are_the_served_ones(session, script)

    run(["Let me see.\n" + CALL, RESULT], play)


def test_chat_has_samples_stops_logprobs_seeds_and_limits():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            answer: Any = await client.chat.completions.create(
                model="m",
                messages=ASK,
                n=2,
                seed=3,
                stop=["##"],
                max_completion_tokens=9,
                logprobs=True,
                extra_body={"return_token_ids": True, "state": "room 1"},
            )
        assert [choice.message.content for choice in answer.choices] == ["one", "two"]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
        assert (script.seeds, script.limits) == ([3, 4], [9, 9])
        nodes = [node for node in session.trajectory().nodes if node.author == "policy"]
        for choice, node in zip(answer.choices, nodes, strict=True):
            assert choice.token_ids == node.token_ids and choice.policy_versions == [[len(node.token_ids), 3]]
            assert [entry.logprob for entry in choice.logprobs.content] == node.sampled.logprobs
            assert node.state == "room 1"
        assert "".join(entry.token for entry in answer.choices[0].logprobs.content).startswith("one##")
        assert answer.usage.completion_tokens == sum(len(node.token_ids) for node in nodes)

    run(["one## and more", "two..."], play)


def test_parameters_of_sampling_are_not_applied_but_counted():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            answer = await client.chat.completions.with_raw_response.create(
                model="m", messages=ASK, temperature=0.1, top_p=0.5, extra_body={"top_k": 3}
            )
        assert answer.headers["x-rlinf-ignored"] == "temperature, top_p, top_k"
        assert session.counts["ignored_temperature"] == session.counts["ignored_top_k"] == 1

    run(["a"], play)


@pytest.mark.parametrize("streams", [False, True])
def test_completions_continue_a_text(streams):
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            text = "a"
            for _ in range(2):
                answer = await client.completions.create(model="m", prompt=text, stream=streams)
                if streams:
                    text += "".join([chunk.choices[0].text async for chunk in answer])
                else:
                    text += answer.choices[0].text
        assert text == "abbcc"
        assert_trained_tokens_are_the_served_ones(session, script)

    run(["bb", "cc"], play, template=plain_template())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("continues", ["items", "previous_response_id"])
def test_an_agent_of_openai_responses_calls_a_tool_and_answers(streams, continues):
    tool = {"type": "function", **ADD["function"]}

    async def turn(client, **arguments):
        if not streams:
            return await client.responses.create(model="m", tools=[tool], **arguments)
        async with client.responses.stream(model="m", tools=[tool], **arguments) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            answer = await stream.get_final_response()
            assert "".join(texts) == answer.output_text
        return answer

    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            answer = await turn(client, input="2 + 3?", instructions="Be brief.")
            (call,) = [item for item in answer.output if item.type == "function_call"]
            assert (answer.output_text, call.name, json.loads(call.arguments)) == ("Hm.", "add", {"a": 2, "b": 3})
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            if continues == "items":
                items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
                history = {"input": [{"role": "user", "content": "2 + 3?"}, *items, result]}
            else:
                history = {"input": [result], "previous_response_id": answer.id}
            answer = await turn(client, instructions="Be brief.", **history)
            assert (answer.output_text, answer.status) == (RESULT, "completed")
        assert session.counts["continued"] == 1 and not session.counts["roots"]
        assert_trained_tokens_are_the_served_ones(session, script)

    run(["Hm.\n" + CALL, RESULT], play)


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_anthropic_calls_a_tool_and_answers(streams):
    tool = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}

    async def turn(client, messages):
        arguments = {"model": "m", "max_tokens": 99, "system": "Be brief.", "tools": [tool], "messages": messages}
        if not streams:
            return await client.messages.create(**arguments)
        async with client.messages.stream(**arguments) as stream:
            texts = [text async for text in stream.text_stream]
            answer = await stream.get_final_message()
            assert "".join(texts) == "".join(block.text for block in answer.content if block.type == "text")
        return answer

    async def play(base_url, token, session, script):
        async with AsyncAnthropic(base_url=base_url, api_key=token, max_retries=0) as client:
            answer = await turn(client, ASK)
            assert answer.stop_reason == "tool_use" and answer.content[0].text == "Hm."
            assert (answer.content[1].name, answer.content[1].input) == ("add", {"a": 2, "b": 3})
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            result = {"type": "tool_result", "tool_use_id": answer.content[1].id, "content": "5"}
            history = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            answer = await turn(client, history)
            assert (answer.content[0].text, answer.stop_reason) == (RESULT, "end_turn")
            assert answer.usage.output_tokens == len(script.served[1].token_ids)
        assert session.counts["continued"] == 1 and not session.counts["roots"]
        assert_trained_tokens_are_the_served_ones(session, script)

    run(["Hm.\n" + CALL, RESULT], play)


def test_a_full_context_and_used_turns_are_errors_that_sdks_do_not_retry():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token) as client:
            await client.chat.completions.create(model="m", messages=ASK)
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=ASK)
            assert caught.value.code == "turns_exhausted"
        with pytest.raises(EpisodeEnded) as ended:
            session.raise_end()
        assert ended.value.cause == "turns"

    run(["a"], play, limits=SessionLimits(max_turns=1, max_context_tokens=99, max_new_tokens=9))

    async def play_long(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=ASK)
            assert caught.value.code == "context_length_exceeded"

    run(["a"], play_long, limits=SessionLimits(max_turns=1, max_context_tokens=9, max_new_tokens=9))


@pytest.mark.parametrize(
    ("failure", "status", "cause"), [(EpisodeEnded("engine_lost"), 503, "engine_lost"), (KeyError("x"), 500, "service")]
)
def test_a_failure_that_the_policy_did_not_cause_ends_the_session_with_its_cause(failure, status, cause):
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=ASK)
        assert (caught.value.status_code, caught.value.code) == (status, cause)
        assert len(script.prompts) == 1  # no retry has asked again
        assert session.end.cause == cause

    run([failure, "a"], play)


def test_a_session_needs_its_token_and_must_exist():
    async def play(base_url, token, session, script):
        async with aiohttp.ClientSession() as client:
            body = {"messages": ASK}
            statuses = []
            for url, headers in (
                (base_url, {}),
                (base_url, {"Authorization": "Bearer wrong"}),
                (base_url.replace("sessions/a", "sessions/c"), {"Authorization": f"Bearer {token}"}),
                (base_url, {"Authorization": f"Bearer {token}"}),
                (base_url, {"x-api-key": token}),
            ):
                async with client.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
                    statuses.append(answer.status)
            assert statuses == [401, 401, 404, 200, 200]
            async with client.get(f"{base_url}/models", headers={"x-api-key": token}) as answer:
                assert (await answer.json())["data"][0]["id"] == "policy"

    run(["a", "b"], play)


def test_what_is_too_much_is_refused():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            first = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASK))
            while not script.prompts:
                await asyncio.sleep(0.001)
            with pytest.raises(RateLimitError, match="1 requests at a time"):
                await client.chat.completions.create(model="m", messages=ASK)
            await first
            long: Any = [{"role": "user", "content": "x" * 5000}]
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=long)
            assert caught.value.status_code == 413

    run(["a"], play, server_limits=ServerLimits(max_concurrent=1, max_body_bytes=4000), delay_s=0.3)

    async def fill():
        server = SessionServer(limits=ServerLimits(max_sessions=1))
        await server.start()
        template = plain_template()
        sessions = [AgentSession(name, template, Script(template, []), LIMITS) for name in "ab"]
        server.open(sessions[0])
        with pytest.raises(RuntimeError, match="max_sessions"):
            server.open(sessions[1])
        await server.stop()

    asyncio.run(fill())


def test_a_client_that_hangs_up_cancels_its_sampling():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            request = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASK))
            while not script.prompts:
                await asyncio.sleep(0.001)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        while not script.num_cancelled:
            await asyncio.sleep(0.001)
        assert not [node for node in session.trajectory().nodes if node.author == "policy"]

    run(["a"], play, delay_s=60)


def test_closing_a_session_answers_its_open_requests():
    async def main():
        template = chatml_template()
        script = Script(template, ["a"], delay_s=60)
        server = SessionServer()
        await server.start()
        base_url, token = server.open(AgentSession("s", template, script, LIMITS))
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            request = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASK))
            while not script.prompts:
                await asyncio.sleep(0.001)
            server.close("s")
            with pytest.raises(APIStatusError, match="the session was closed"):
                await request
        assert script.num_cancelled == 1
        await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "audio"),
        ("chat/completions", {"messages": ASK, "n": "two"}, "n='two' is no whole number"),
        ("completions", {"prompt": "a", "echo": True}, "echo is not served"),
        ("responses", {"input": [{"type": "computer_call"}]}, r"input[0] is of type 'computer_call'"),
        ("messages", {"messages": ASK, "tool_choice": "auto"}, "a value of the wrong type"),
        ("chat/completions", {"messages": ASK, "stream_options": 3}, "a value of the wrong type"),
        ("responses", {"input": "x", "previous_response_id": "resp_9"}, "no answer of this session"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'audio', which is not served"),
    ],
)
def test_a_request_that_cannot_be_served_is_an_error_of_its_dialect(path, body, message):
    async def play(base_url, token, session, script):
        async with (
            aiohttp.ClientSession(headers={"x-api-key": token}) as client,
            client.post(f"{base_url}/{path}", json=body) as answer,
        ):
            error = (await answer.json())["error"]
            assert answer.status == 400 and error["type"] == "invalid_request_error"
            assert message in error["message"]
        assert session.end is None

    run(["a"], play)


def test_the_model_of_a_request_names_the_agent_where_there_are_several():
    async def play(base_url, token, session, script):
        async with AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0) as client:
            assert [one.id async for one in client.models.list()] == ["solver", "judge"]
            answer = await client.chat.completions.create(model="judge", messages=ASK)
            assert answer.model == "judge"
            with pytest.raises(BadRequestError, match="'policy' is none of this job's agents, solver, judge"):
                await client.chat.completions.create(model="policy", messages=ASK)
            await client.completions.create(model="solver", prompt="2 + 3?")
        assert script.agents == ["judge", "solver"]
        assert [node.agent for node in session.trajectory().nodes if node.sampled] == ["judge", "solver"]

    run(["5", "6"], play, agents=("solver", "judge"))
