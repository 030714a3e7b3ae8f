"""Draws curves as a PNG picture. matplotlib is imported only here and is the extra `plots`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rlinf.errors import UserError
from rlinf.report.curves import Curve

MAX_COLUMNS = 3
PLOT_INCHES = (5.0, 3.5)
DOTS_PER_INCH = 150


def write_picture(curves: Sequence[Curve], path: Path) -> None:
    """Writes the plots side by side, with one legend for all.

    Args:
        curves: at least one; their colors are matplotlib's.

    Raises: UserError without matplotlib, OSError.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        hint = "pip install 'rlinf[plots]', or let the name end in .html"
        raise UserError(f"--output={path}: a picture needs matplotlib", hint=hint) from error
    num_columns = min(MAX_COLUMNS, len(curves))
    num_rows = math.ceil(len(curves) / num_columns)
    size = (PLOT_INCHES[0] * num_columns, PLOT_INCHES[1] * num_rows)
    figure = Figure(figsize=size, layout="constrained")
    legend = {}
    for place, curve in enumerate(curves, start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        for line in curve.lines:
            marker = "o" if line.has_marks else None
            (legend[line.label],) = axes.plot(line.series.steps, line.series.values, color=line.color, marker=marker)
        axes.set_title(f"{curve.title} ({curve.unit})" if curve.unit else curve.title)
        axes.set_xlabel(curve.axis)
        if curve.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center")
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
