"""Text of others, made safe for messages, terminals and JSON."""


def printable(text: str, max_length: int) -> str:
    r"""Replaces control characters, invisible characters and lone surrogates with escapes such as ``\x1b``."""
    cut = text if len(text) <= max_length else f"{text[:max_length]}..."
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in cut)


def shown(name: str, longest: int = 64) -> str:
    """Returns the beginning of a caller's name, with ``?`` for each character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in name[:longest])
