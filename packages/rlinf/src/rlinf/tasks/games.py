"""Small generated tasks of several turns, for models with one token a character: a calculator, operators to find, two
look-ups, a grid to cross, two players who must agree.

A call is `[NAME:ARGUMENT]` at the end of a turn, its result `{RESULT}`; see rlinf_workers.agents.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rlinf.tasks.base import TaskProblem
from rlinf_algos import RewardError
from rlinf_workers.agents.tools import SearchOptions, SearchTool, ToolFailed

# -- calculate ---------------------------------------------------------------------------------------------------------


def multiply(generator: random.Random, num_digits: int) -> TaskProblem:
    """Returns a problem such as `347*582=` -> `201954`, which is solved with a call of `calc`."""
    a, b = generator.randrange(10**num_digits), generator.randrange(10**num_digits)
    product_text, answer = f"{a:0{num_digits}d}*{b:0{num_digits}d}", str(a * b)
    solution = (("policy", f"[calc:{product_text}]"), ("tool", f"{{{answer}}}"), ("policy", answer))
    return TaskProblem(prompt=f"{product_text}=", answer=answer, solutions=(solution,))


async def calc(product: str) -> str:
    """Multiplies two whole numbers.

    Args:
        product: what to compute, such as 12*34.
    """
    a, _, b = product.partition("*")
    if not (a.isdecimal() and b.isdecimal()):
        raise ToolFailed("no product")
    return str(int(a) * int(b))


# -- operators ---------------------------------------------------------------------------------------------------------

OPERATORS = "+-*"
MAX_WRONG = 2
"""Wrong programs in a solution, before the right one."""


def find_operators(generator: random.Random, num_numbers: int) -> TaskProblem:
    """Returns a problem such as `3?7?4=025` -> `*+`, which is solved by running programs until one is right."""
    numbers = [generator.randrange(1, 10) for _ in range(num_numbers)]
    values = {"".join(signs): _value(numbers, signs) for signs in product(OPERATORS, repeat=num_numbers - 1)}
    answer = generator.choice(list(values))
    prompt = "?".join(map(str, numbers)) + f"={values[answer]:04d}"
    wrong = [signs for signs, value in values.items() if value != values[answer]]
    tried = generator.sample(wrong, min(len(wrong), generator.randrange(MAX_WRONG + 1)))
    turns = [
        turn
        for signs in (*tried, answer)
        for turn in (("policy", f"[python:{_program(numbers, signs)}]"), ("tool", f"{{{values[signs]}}}"))
    ]
    return TaskProblem(prompt=prompt, answer=answer, solutions=((*turns, ("policy", answer)),))


def operators_are_right(completion: str, answer: str, prompt: str) -> bool:
    """Whether the operators give the value that the prompt asks for; the reward of `find_operators`."""
    left, _, value = prompt.partition("=")
    numbers = list(map(int, left.split("?")))
    is_valid = len(completion) == len(numbers) - 1 and all(sign in OPERATORS for sign in completion)
    return is_valid and _value(numbers, completion) == int(value)


def _program(numbers: list[int], signs: Any) -> str:
    return str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))


def _value(numbers: list[int], signs: Any) -> int:
    """The value of the expression, products first."""
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)


# -- two look-ups ------------------------------------------------------------------------------------------------------

NUM_PLACES = 300
CONSONANTS, VOWELS = "bdfgklmnprt", "aeiou"


@cache
def roads() -> dict[str, str]:
    """Place -> the place that its road leads to, the same in every run; following roads visits all places."""
    generator = random.Random("roads")
    names = [first + vowel + last for first in CONSONANTS for vowel in VOWELS for last in CONSONANTS]
    places = generator.sample(names, NUM_PLACES)
    return dict(zip(places, places[1:] + places[:1], strict=True))


def two_roads(generator: random.Random) -> TaskProblem:
    """Returns a problem such as `kav>>` -> `fil`: the place that two roads lead to, which two searches find."""
    start = generator.choice(list(roads()))
    between = roads()[start]
    looked_up = [
        turn for place in (start, between) for turn in (("policy", f"[find:{place}]"), ("tool", f"{{{_found(place)}}}"))
    ]
    answer = roads()[between]
    return TaskProblem(prompt=f"{start}>>", answer=answer, solutions=((*looked_up, ("policy", answer)),))


def _found(place: str) -> str:
    """What a search for a place returns."""
    return f"[1] {place}\n{place} {roads()[place]}"


class RoadSearch(SearchTool):
    """The tool `search` over a made corpus: a document for each place, which says where its road leads."""

    def __init__(self) -> None:
        with NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
            for place, target in roads().items():
                file.write(json.dumps({"id": place, "title": place, "text": f"{place} {target}"}) + "\n")
        super().__init__(SearchOptions(path=file.name, top_k=1, name="find"))

    async def start(self) -> None:
        await super().start()
        Path(self._options.path).unlink(missing_ok=True)


# -- cross a grid ------------------------------------------------------------------------------------------------------

COLUMNS, ROWS = "abcde", "12345"
MOVES = {"l": (-1, 0), "r": (1, 0), "d": (0, -1), "u": (0, 1)}
MAX_MOVES = 10
SHARE_OF_GOOD = 0.3
"""Of the moves of an example; the others are random."""


def cross_grid(generator: random.Random) -> TaskProblem:
    """Returns a problem such as `a2>d4=`: moves l, r, u, d lead from the first field to the second. Most moves
    of an example are random."""
    fields = [column + row for column in COLUMNS for row in ROWS]
    start, goal = generator.sample(fields, 2)
    turns, here = [], start
    while here != goal and len(turns) < 2 * MAX_MOVES:
        good = [move for move in MOVES if _distance(_moved(here, move), goal) < _distance(here, goal)]
        move = generator.choice(good if generator.random() < SHARE_OF_GOOD else list(MOVES))
        here = _moved(here, move)
        turns += [("policy", move), ("user", f"{here}=")]
    turns = turns[:-1] if here == goal else turns
    return TaskProblem(prompt=f"{start}>{goal}=", answer=goal, solutions=(tuple(turns),))


async def play_grid(session: Any, task: Any) -> float:
    """An agent: makes the policy's moves and tells it where it is. A move is rewarded with the share of the way that it
    leads on, so an episode that reaches the goal in time has a reward of 1."""
    here, goal = task.text.rstrip("=").split(">")
    way = _distance(here, goal)
    messages = list(task.messages)
    for _ in range(MAX_MOVES):
        session.next_state = f"{here}>{goal}"
        (turn,) = await session.chat(messages)
        there = _moved(here, turn.text)
        session.reward_turn(turn, (_distance(here, goal) - _distance(there, goal)) / way)
        here = there
        if here == goal:
            break
        messages += [turn.message(), {"role": "user", "content": f"{here}="}]
    return 0.0  # beside the rewards of turns


def _moved(here: str, move: str) -> str:
    """The field that a move leads to; the same at the edge, and for what is no move."""
    across, up = MOVES.get(move, (0, 0))
    column, row = COLUMNS.index(here[0]) + across, ROWS.index(here[1]) + up
    is_inside = 0 <= column < len(COLUMNS) and 0 <= row < len(ROWS)
    return COLUMNS[column] + ROWS[row] if is_inside else here


def _distance(one: str, other: str) -> int:
    return abs(COLUMNS.index(one[0]) - COLUMNS.index(other[0])) + abs(ROWS.index(one[1]) - ROWS.index(other[1]))


# -- a team of two -----------------------------------------------------------------------------------------------------

SECRETS, SIGNS = "01234567", "wxyz"
NUM_SIGNS = 2
NO_SIGNS = -0.5
"""Reward of the hinter for anything but two signs."""


def secret(generator: random.Random) -> TaskProblem:
    """Returns a problem such as `!3=`: one player sees the secret and writes two signs, the other reads them and
    guesses. Of the examples, half of the signs and of the guesses are random."""
    answer = generator.choice(SECRETS)
    agreed = "".join(SIGNS[int(answer) // len(SIGNS) ** place % len(SIGNS)] for place in range(NUM_SIGNS))
    signs = agreed if generator.random() < 0.5 else "".join(generator.choice(SIGNS) for _ in range(NUM_SIGNS))
    guessed = answer if generator.random() < 0.5 else generator.choice(SECRETS)
    solutions = ((("policy", signs),), (("task", f"!{agreed}="), ("policy", guessed)))
    return TaskProblem(prompt=f"!{answer}=", answer=answer, solutions=solutions)


async def play_team(session: Any, task: Any) -> float:
    """Two agents, which are parts of one policy: the hinter sees the secret, the guesser only the signs. Returns 1 for
    a right guess. What are no signs is the fault of the hinter alone."""
    (hint,) = await session.chat(task.messages, agent="hinter")
    signs = hint.text
    if len(signs) != NUM_SIGNS or any(sign not in SIGNS for sign in signs):
        session.reward(NO_SIGNS, agent="hinter")
        return 0.0
    (guess,) = await session.chat([{"role": "user", "content": f"!{signs}="}], agent="guesser")
    return float(guess.text == task.answer)


def no_rule(completion: str, answer: str) -> float:
    """The reward of a job whose agent returns the reward. Raises: RewardError, since it returned none."""
    raise RewardError("reward.kind=episode: the agent returned no reward (None) for an episode")
