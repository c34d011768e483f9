"""Text of files and plugins as a terminal may have it; imported at every start, so it imports nothing."""


def printable(text: str) -> str:
    """Write a name or sentence on one line, whatever is in it: no control character reaches a terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Write text of several lines, each as ``printable`` does."""
    return "\n".join(map(printable, text.split("\n")))
