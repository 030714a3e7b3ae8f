"""Formats numbers with units."""


def seconds(value: float) -> str:
    """`64.4 us`, `85.3 ms`, `2.41 s`, `4 min 12 s`, `2 h 05 min`."""
    if 0 < value < 0.9995e-3:
        return f"{value * 1e6:.3g} us"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 119.5:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def gib(num_bytes: float) -> str:
    """`61.2 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), *words[-1:]])


def counted(count: int, noun: str) -> str:
    """`1 device`, `8 devices`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
