"""Escapes text of files and processes for a terminal."""


def printable(line: str) -> str:
    """Escapes the control characters of a line, so that logs, names and files cannot control the terminal."""
    return "".join(
        character if character.isprintable() or character == "\t" else ascii(character)[1:-1] for character in line
    )


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))
