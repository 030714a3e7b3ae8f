"""Text of files and processes, as it may be written to a terminal."""


def printable(line: str) -> str:
    """A line with its control characters escaped: logs, names and files must not steer a terminal."""
    return "".join(
        character if character.isprintable() or character == "\t" else ascii(character)[1:-1] for character in line
    )


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))
