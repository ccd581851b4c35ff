"""What becomes here of a flag that another project calls otherwise: a row of `foreign_flags`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Foreign:
    """What a flag of another project becomes here.

    Attributes:
        whose: who calls it so.
        ours: the flag that means the same, whatever its value.
        values: {one of its values: what says it here}, () where it is so anyway.
        why: a sentence about any other value.
        also: function of a value that `values` does not hold, to what says it here, or None.
        example: a value that `also` takes.
    """

    whose: str
    ours: str = ""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    why: str = ""
    also: Callable[[str], tuple[str, ...] | None] = lambda value: None
    example: str = ""

    def put(self, name: str, given: list[str]) -> list[str]:
        """Our words for `name` with the values `given`. Raises ValueError with the reason why not.

        A flag without a value is taken for "true", as TRL's parser does.
        """
        if self.ours:
            return [self.ours, *given]
        words = []
        for value in given or ["true"]:
            here = self.values.get(plain(value))
            here = self.also(value) if here is None else here
            if here is None:
                raise ValueError(f"{' '.join([name, *given])}: {self.why}")
            words += here
        return words

    def here(self) -> str:
        """The cell of the table."""
        if self.ours:
            return f"`{self.ours}`"
        said = [(value, " ".join(words)) for value, words in self.values.items()]
        said += [(self.example, " ".join(self.also(self.example)))] if self.example else []
        parts = [f"`{v}`: {f'`{words}`' if words else 'so anyway'}" for v, words in said]
        parts += [f"{'else ' if parts else ''}refused: {self.why}"] if self.why else []
        return "; ".join(parts)

    def named(self) -> set[str]:
        """Our flags that the cell names."""
        return set(re.findall(r"--\w+", self.here()))


def plain(value: str) -> str:
    """One spelling of a value: 1.0 and 1 are one, True and true too."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return value.lower()


def so_anyway(*values: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(values, ())
