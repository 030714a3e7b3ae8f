"""Small generated tasks with pictures: counting shapes, clicking a button of a screen, reading a bar chart.

Pictures are drawn with integers alone, so every machine draws the same. They are made of squares of 16 x 16 pixels, one
token of a tiny model each.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, TypeAlias

from rlinf.config.tasks import CELL
from rlinf.tasks.base import TaskProblem
from rlinf.tasks.pictures import MARKER, ProblemPicture

if TYPE_CHECKING:  # commands that only look at recipes import no numpy
    import numpy as np
    from numpy.typing import NDArray

Drawing: TypeAlias = "NDArray[np.uint8]"
"""[rows, columns, 3]"""

# Image processors subtract about this grey, so that a tiny model sees the shapes alone; with dark grounds it had
# learned nothing after 200 batches.
GROUNDS = ((112, 112, 112), (120, 120, 120), (128, 128, 128))
COLORS = {"blue": (60, 90, 240), "lime": (60, 210, 80), "ruby": (230, 40, 60)}
"""Of the shapes that are counted."""
ALL_COLORS = {**COLORS, "gold": (230, 190, 40), "cyan": (40, 200, 210), "plum": (170, 60, 200)}
"""One for each label of a button, which looks the same on every screen, and for each bar of a chart."""
FRAME = 2
"""Pixels of a window's frame, which buttons leave free."""
SHAPES = ("circle", "square", "cross")
MOST_OF_A_COLOR = 4
LETTERS = {
    "A": (0b01110, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001),
    "E": (0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b11111),
    "H": (0b10001, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001),
    "T": (0b11111, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100),
}
"""Labels of buttons, in rows of 5 pixels."""


def count_shapes(generator: random.Random, num_cells: int) -> TaskProblem:
    """Returns a problem such as `<image>blue?=` -> `3`: circles, squares and crosses of three colors lie in the cells
    of a picture, and those of one color are counted."""
    picture = _ground(generator, num_cells, num_cells)
    cells = [(row, column) for row in range(num_cells) for column in range(num_cells)]
    generator.shuffle(cells)
    counted = generator.choice(list(COLORS))
    count = generator.randrange(min(MOST_OF_A_COLOR, len(cells)) + 1)
    others = [color for color in COLORS if color != counted]
    num_others = generator.randrange(min(MOST_OF_A_COLOR, len(cells) - count) + 1)
    colors = [counted] * count + [generator.choice(others) for _ in range(num_others)]
    for (row, column), color in zip(cells, colors, strict=False):
        _draw_shape(_cell(picture, row, column), generator, COLORS[color])
    return _problem(f"{counted}?=", str(count), picture)


def click_button(generator: random.Random, num_cells: int, num_buttons: int) -> TaskProblem:
    """Returns a problem such as `<image>tap H=` -> `click(2,0)`: the column and row of a button in a window, from the
    top left."""
    picture = _ground(generator, num_cells, num_cells)
    # A tower sees only distances between patches: without edges nothing in it says where in the picture a button is.
    picture[:FRAME] = picture[-FRAME:] = picture[:, :FRAME] = picture[:, -FRAME:] = 255
    cells = [(row, column) for row in range(num_cells) for column in range(num_cells)]
    generator.shuffle(cells)
    labels = list(LETTERS)
    generator.shuffle(labels)
    buttons = list(zip(labels[:num_buttons], cells[:num_buttons], strict=True))
    for label, (row, column) in buttons:
        _draw_button(_cell(picture, row, column), label)
    label, (row, column) = generator.choice(buttons)
    return _problem(f"tap {label}=", f"click({column},{row})", picture)


def read_chart(generator: random.Random, num_bars: int) -> TaskProblem:
    """Returns a problem such as `<image>blue=` -> `7`: the height, in lines of the grid, of one of several bars,
    which have different colors and stand in any order."""
    picture = _ground(generator, 3, num_bars)
    base, unit = picture.shape[0] - 2, 5
    picture[base - 9 * unit : base : unit, :] = 96
    picture[base, :] = 255
    heights = {color: generator.randrange(10) for color in generator.sample(list(ALL_COLORS), num_bars)}
    for bar, (color, height) in enumerate(heights.items()):
        picture[base - height * unit : base, bar * CELL + 4 : bar * CELL + 12] = ALL_COLORS[color]
    color = generator.choice(list(heights))
    return _problem(f"{color}=", str(heights[color]), picture)


def picture_of(drawing: Drawing) -> ProblemPicture:
    """Returns a drawing as a problem has it: an uncompressed file, whose bytes no version of a library changes."""
    height, width, _ = drawing.shape
    content = f"P6 {width} {height} 255\n".encode() + drawing.tobytes()
    digest = hashlib.sha256(content).hexdigest()
    return ProblemPicture(content=content, digest=digest, width=width, height=height, place="")


def _problem(question: str, answer: str, drawing: Drawing) -> TaskProblem:
    return TaskProblem(prompt=f"{MARKER}{question}", answer=answer, pictures=(picture_of(drawing),))


def _ground(generator: random.Random, num_rows: int, num_columns: int) -> Drawing:
    import numpy as np

    drawing = np.empty((num_rows * CELL, num_columns * CELL, 3), np.uint8)
    drawing[:] = generator.choice(GROUNDS)
    return drawing


def _cell(drawing: Drawing, row: int, column: int) -> Drawing:
    return drawing[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def _draw_shape(cell: Drawing, generator: random.Random, color: tuple[int, int, int]) -> None:
    """Draws a shape of random kind and size in the middle of a cell."""
    import numpy as np

    rows, columns = np.mgrid[:CELL, :CELL]
    y, x = abs(2 * rows - CELL + 1), abs(2 * columns - CELL + 1)
    size = generator.choice((11, 13))
    inside = {
        "circle": x * x + y * y <= (size + 1) ** 2,
        "square": np.maximum(x, y) <= size,
        "cross": (np.minimum(x, y) <= 5) & (np.maximum(x, y) <= size),
    }
    cell[inside[generator.choice(SHAPES)]] = color


def _draw_button(cell: Drawing, label: str) -> None:
    import numpy as np

    color = list(ALL_COLORS.values())[list(LETTERS).index(label)]
    cell[FRAME:-FRAME, FRAME:-FRAME] = color
    rows = np.array([[line >> bit & 1 for bit in range(4, -1, -1)] for line in LETTERS[label]], bool)
    cell[4:11, 5:10][rows] = (255, 255, 255) if sum(color) < 360 else (0, 0, 0)
