"""Axes of plots, and number formatting."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"


def ticks(low: float, high: float, *, max_ticks: int = 5, whole: bool = False) -> list[float]:
    """Returns at most max_ticks + 1 round numbers between low and high, 1, 2 or 5 times a power of ten apart.

    Args:
        whole: only whole numbers.
    """
    if not math.isfinite(high - low) or high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        if whole and step < 1:
            continue
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first <= max_ticks:
            return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return [math.ceil(low)] if whole else [low]


def time_axis(length_s: float, *, left: float, width: float, top: int, bottom: int, since: str) -> list[str]:
    """Draws a time grid as SVG: `length_s` seconds from `left` on, with the numbers below `bottom`."""
    unit, factor = ("ms", 1e3) if length_s < 2 else ("s", 1.0) if length_s < 600 else ("min", 1 / 60)
    parts = []
    for value in ticks(0.0, length_s * factor, max_ticks=10):
        x = left + value / factor / length_s * width
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 15}">{number(value)}</text>')
    middle = left + width / 2
    text = f"{unit} since {since}"
    return [*parts, f'<text class="tick" text-anchor="middle" x="{middle:.1f}" y="{bottom + 32}">{text}</text>']


def number(value: float) -> str:
    """Formats a number with three significant digits: `0.0123`, `12.3`, `1,230`, `1.2e-7` (with a true minus sign)."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        text = "0"
    elif size < 1e-3 or size >= 1e7:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"{mantissa}e{int(exponent)}"
    elif size >= 1000 or value == int(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def percent(value: float) -> str:
    """Formats a share: `84.2 %`."""
    return f"{value:.1%}".replace("%", "\N{NO-BREAK SPACE}%").replace("-", MINUS)
