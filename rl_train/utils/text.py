"""Words about numbers."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 region", "4,572 regions"."""
    return f"{number:,d} {noun}{'s' * (number != 1)}"
