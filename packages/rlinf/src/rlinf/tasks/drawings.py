"""Small generated tasks with pictures: counting shapes, clicking a button of a screen, reading a bar chart.

Pictures are drawn with integers alone, so every machine draws the same. They are made of squares of 16 x 16 pixels, one
token of a tiny model each.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
from numpy.typing import NDArray

from rlinf.config.tasks import CELL
from rlinf.tasks.base import TaskProblem
from rlinf.tasks.pictures import MARKER, ProblemPicture

Drawing = NDArray[np.uint8]
"""[rows, columns, 3]"""

GROUNDS = ((16, 16, 24), (40, 40, 48), (24, 32, 24))
COLORS = ((230, 60, 60), (70, 200, 90), (80, 120, 240), (240, 210, 70))
SHAPES = ("circles", "squares", "crosses")
MOST_OF_A_SHAPE = 4
LETTERS = {
    "A": (0b01110, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001),
    "C": (0b01111, 0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b01111),
    "E": (0b11111, 0b10000, 0b10000, 0b11110, 0b10000, 0b10000, 0b11111),
    "H": (0b10001, 0b10001, 0b10001, 0b11111, 0b10001, 0b10001, 0b10001),
    "L": (0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b10000, 0b11111),
    "T": (0b11111, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100, 0b00100),
}
"""Labels of buttons, in rows of 5 pixels."""


def count_shapes(generator: random.Random, num_cells: int) -> TaskProblem:
    """Returns a problem such as `<image>squares?=` -> `3`: shapes of three kinds lie in the cells of a picture."""
    picture = _ground(generator, num_cells, num_cells)
    cells = [(row, column) for row in range(num_cells) for column in range(num_cells)]
    generator.shuffle(cells)
    asked_for = generator.choice(SHAPES)
    count = generator.randrange(min(MOST_OF_A_SHAPE, len(cells)) + 1)
    others = [shape for shape in SHAPES if shape != asked_for]
    num_others = generator.randrange(min(MOST_OF_A_SHAPE, len(cells) - count) + 1)
    shapes = [asked_for] * count + [generator.choice(others) for _ in range(num_others)]
    for (row, column), shape in zip(cells, shapes, strict=False):
        _draw_shape(_cell(picture, row, column), generator, shape)
    return _problem(f"{asked_for}?=", str(count), picture)


def click_button(generator: random.Random, num_cells: int) -> TaskProblem:
    """Returns a problem such as `<image>tap H=` -> `click(2,0)`: the column and row of a button on a screen, from the
    top left."""
    picture = _ground(generator, num_cells, num_cells)
    cells = [(row, column) for row in range(num_cells) for column in range(num_cells)]
    generator.shuffle(cells)
    labels = list(LETTERS)
    generator.shuffle(labels)
    buttons = list(zip(labels, cells, strict=False))
    for label, (row, column) in buttons:
        _draw_button(_cell(picture, row, column), generator.choice(COLORS), label)
    label, (row, column) = generator.choice(buttons)
    return _problem(f"tap {label}=", f"click({column},{row})", picture)


def read_chart(generator: random.Random, num_bars: int) -> TaskProblem:
    """Returns a problem such as `<image>bar 2=` -> `7`: the height of a bar, counted from 0, in lines of the grid."""
    picture = _ground(generator, 3, num_bars)
    base, unit = picture.shape[0] - 2, 5
    picture[base - 9 * unit : base : unit, :] = 96
    picture[base, :] = 255
    heights = [generator.randrange(10) for _ in range(num_bars)]
    for bar, height in enumerate(heights):
        picture[base - height * unit : base, bar * CELL + 4 : bar * CELL + 12] = generator.choice(COLORS)
    bar = generator.randrange(num_bars)
    return _problem(f"bar {bar}=", str(heights[bar]), picture)


def picture_of(drawing: Drawing) -> ProblemPicture:
    """Returns a drawing as a problem has it: an uncompressed file, whose bytes no version of a library changes."""
    height, width, _ = drawing.shape
    content = f"P6 {width} {height} 255\n".encode() + drawing.tobytes()
    digest = hashlib.sha256(content).hexdigest()
    return ProblemPicture(content=content, digest=digest, width=width, height=height, place="")


def _problem(question: str, answer: str, drawing: Drawing) -> TaskProblem:
    return TaskProblem(prompt=f"{MARKER}{question}", answer=answer, pictures=(picture_of(drawing),))


def _ground(generator: random.Random, num_rows: int, num_columns: int) -> Drawing:
    drawing = np.empty((num_rows * CELL, num_columns * CELL, 3), np.uint8)
    drawing[:] = generator.choice(GROUNDS)
    return drawing


def _cell(drawing: Drawing, row: int, column: int) -> Drawing:
    return drawing[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def _draw_shape(cell: Drawing, generator: random.Random, shape: str) -> None:
    """Draws a shape of random size and color near the middle of a cell."""
    radius, color = generator.choice((4, 5)), generator.choice(COLORS)
    rows, columns = np.mgrid[:CELL, :CELL]
    y, x = rows - generator.choice((7, 8)), columns - generator.choice((7, 8))
    inside = {
        "circles": x * x + y * y <= radius * radius,
        "squares": np.maximum(abs(x), abs(y)) < radius,
        "crosses": (np.minimum(abs(x), abs(y)) < 2) & (np.maximum(abs(x), abs(y)) <= radius),
    }
    cell[inside[shape]] = color


def _draw_button(cell: Drawing, color: tuple[int, int, int], label: str) -> None:
    cell[1:-1, 1:-1] = color
    rows = np.array([[line >> bit & 1 for bit in range(4, -1, -1)] for line in LETTERS[label]], bool)
    cell[4:11, 5:10][rows] = (255, 255, 255) if sum(color) < 400 else (0, 0, 0)
