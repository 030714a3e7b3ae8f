"""Text environments that tests play; the agent process imports this file."""

from rlinf_workers.agents.tools import TextStep


class EndsAtThree:
    """A text environment: begins with a digit of the seed, and ends with the third answer."""

    def __init__(self, *, reward):
        self.reward, self.num_steps = reward, 0

    async def reset(self, seed, row):
        return TextStep(text=str(seed % 10))

    async def step(self, text):
        self.num_steps += 1
        return TextStep(text=str(self.num_steps), reward=self.reward, terminated=self.num_steps == 3)

    async def close(self):
        pass
