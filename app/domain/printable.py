"""Text of files and names of folders, made safe for a terminal and for JSON."""


def printable(text: str, max_length: int) -> str:
    r"""Replaces control characters, invisible characters and lone surrogates with escapes such as ``\x1b``."""
    cut = text if len(text) <= max_length else f"{text[:max_length]}..."
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in cut)
