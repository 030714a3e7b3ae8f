"""Harnesses and agents that tests run, good and bad; the harness process imports this file."""

import asyncio
import json
import threading
import time
import urllib.request

from rlinf_workers.agents.pictures import part_of

NUM_MEETING = 100
_MEETING = threading.Barrier(NUM_MEETING)


def _post(base_url, key, body):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


async def chat(base_url, session, messages, **more):
    body = {"model": "policy", "messages": messages, **more}
    return await asyncio.to_thread(_post, base_url, session.api_key, body)


async def answers(base_url, task, *, session):
    """Two turns, a reward for the first, and a number for the episode."""
    print("begins", task["text"])
    messages = list(task["messages"])
    first = await chat(base_url, session, messages)
    session.reward(0.25, turn=0)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "7"}]
    await chat(base_url, session, messages)
    print("ends")
    return 2.0


async def leaves_it_to_the_rule(base_url, task, *, session):
    await chat(base_url, session, task["messages"])


async def raises(base_url, task, *, session):
    await chat(base_url, session, task["messages"])
    raise KeyError("no such thing")


def meets_others(base_url, task, *, session):
    """Ends when as many episodes as NUM_MEETING are under way."""
    _MEETING.wait(30)
    return 1.0


def hangs(base_url, task, *, session):
    time.sleep(600)


def runs_a_program(base_url, task, *, session):
    """An agent in a process of its own, which knows nothing but env vars."""
    import subprocess
    import sys

    program = (
        "import json, os, urllib.request as u\n"
        "r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions',"
        " json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': '12'}]}).encode(),"
        " {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
        "print(json.loads(u.urlopen(r).read())['choices'][0]['message']['content'])"
    )
    subprocess.run([sys.executable, "-c", program], env=session.env(), check=True)
    return 1.0


async def play_two(session, task):
    """In the agent process: two turns of one conversation."""
    (turn,) = await session.chat(task.messages)
    await session.chat([*task.messages, turn.message(), {"role": "user", "content": "5"}])
    return 1.0


async def play_and_fail(session, task):
    await session.chat(task.messages)
    raise RuntimeError("a bug of the agent")


async def broken(number: str) -> str:
    """Fails by itself.

    Args:
        number: anything.
    """
    raise ConnectionError("the service is down")


async def slow(number: str) -> str:
    """Takes too long.

    Args:
        number: anything.
    """
    await asyncio.sleep(600)
    return ""


async def echo(number: str) -> str:
    """Returns its argument.

    Args:
        number: anything.
    """
    return number


async def two_players(base_url, task, *, session):
    """Two agents over HTTP, the second with the tokens of the first as a text."""
    first = await chat(base_url, session, task["messages"], model="solver")
    text = first["choices"][0]["message"]["content"]
    await chat(base_url, session, [{"role": "user", "content": f"{text}="}], model="judge")
    session.reward(0.5, agent="solver")
    session.reward(-1, agent="judge")
    session.reward(0.25)


async def rewards_a_stranger(base_url, task, *, session):
    await chat(base_url, session, task["messages"], model="solver")
    session.reward(1.0, agent="stranger")
    await asyncio.sleep(600)


async def play_both(session, task):
    """In the agent process: two agents at once, and then the first again."""
    (turn,), _ = await asyncio.gather(
        session.chat(task.messages, agent="solver"), session.chat(task.messages, agent="judge")
    )
    await session.chat([*task.messages, turn.message(), {"role": "user", "content": "5"}], agent="solver")
    session.reward(0.5, agent="judge")
    return 1.0


async def branches(session, task):
    """Goes on with the recipe's tools, and once more from the state that they had before."""
    (turn,) = await session.chat(task.messages, tools=session.tools.specs)
    messages = [*task.messages, turn.message(), *await session.tools.answers(turn.tool_calls)]
    await session.chat(messages, tools=session.tools.specs)
    await session.tools.call("python", {"code": "x = 5"})
    other = session.tools.branch("other")
    await session.tools.call("python", {"code": "x += 1"})
    texts = [(await tools.call("python", {"code": "x"})).text for tools in (session.tools, other)]
    return float(texts == ["6\n", "5\n"])


def drawing(number: int) -> bytes:
    """A PNG of noise."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def look_twice(session, task):
    """Shows the policy a picture after each of its first two turns, the same ones in all episodes of a prompt."""
    messages = list(task.messages)
    for number in range(2):
        (turn,) = await session.chat(messages)
        content = [{"type": "text", "text": "b"}, part_of(drawing(10 * task.index + number))]
        messages += [turn.message(), {"role": "user", "content": content}]
    await session.chat(messages)
    return 1.0
