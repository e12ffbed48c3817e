"""Names of a caller in messages."""


def shown(name: str, longest: int = 64) -> str:
    """Returns the beginning of a name, with ``?`` for each character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in name[:longest])
