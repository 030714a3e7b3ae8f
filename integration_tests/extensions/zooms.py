"""An agent that shows the policy a second picture, as a tool's result would."""

import io

import numpy as np
from PIL import Image

from rlinf_workers.agents import part_of


async def look_again(session, task):
    """Two turns; the second sees the picture of the task and another one."""
    (turn,) = await session.chat(task.messages)
    pixels = np.full((48, 48, 3), 16 * (task.index % 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    closer = {"role": "tool", "content": [part_of(file.getvalue()), {"type": "text", "text": "?="}]}
    await session.chat([*task.messages, turn.message(), closer])
