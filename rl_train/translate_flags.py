"""A command line of other projects in our words, and the tables that show what becomes of it."""

from collections.abc import Iterator

from rl_train.foreign import Foreign, plain
from rl_train.foreign_flags import DEFAULTS, FOREIGN, OURS


def translate(argv: list[str], known) -> list[str]:
    """`argv` in our words.

    Args:
        known: the flags of our parser, which keep their meaning.

    Raises:
        ValueError: a flag that is refused, or two that say the same of which one is not ours.
    """
    words, said = [], {}  # {our flag: the first that said it}
    for name, given, written in pieces(argv):
        if not name.startswith("--"):  # argparse says what is wrong with it, or what it asks (-h)
            words += written
            continue
        if name not in known and underscored(name) in known:
            name, written = underscored(name), [underscored(name), *given]
        put = _put(name, given, written, known)
        for flag in {word.partition("=")[0] for word in put if word.startswith("--")}:
            flag = flag.replace("--no-", "--", 1)
            first = said.setdefault(flag, name)
            if first != name and not (first in known and name in known):
                raise ValueError(f"{first} and {name} both say {flag}: give one of them")
        words += put
    return words


def pieces(argv: list[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(flag, its values, the words as written) of each piece of a command line, in order."""
    starts = [0, *(i for i, word in enumerate(argv) if i and word.startswith("--")), len(argv)]
    for start, end in zip(starts, starts[1:]):
        written = argv[start:end]
        if written:
            name, equals, value = written[0].partition("=")
            yield name, [value] * bool(equals) + written[1:], written


def _put(name: str, given: list[str], written: list[str], known) -> list[str]:
    """What says a piece of a command line here. Raises ValueError if it is refused."""
    if name in known:
        here = OURS.get(name, {}).get(" ".join(map(plain, given)))
        return written if here is None else list(here)
    row = find(name)
    if row is None or not row.named() <= set(known):  # another program may lack ours: no advice
        return written
    return row.put(name, given)


def find(name: str) -> Foreign | None:
    """The row of a flag that others call so, dashes or not; one with * is of all that begin so."""
    name = underscored(name)
    families = {begin[:-1]: row for begin, row in FOREIGN.items() if begin.endswith("*")}
    of_family = [row for begin, row in families.items() if name.startswith(begin)]
    return FOREIGN.get(name) or (of_family[0] if of_family else None)


def underscored(name: str) -> str:
    """A flag with _ in place of -, as which TRL's parser takes either."""
    return "--" + name.removeprefix("--").replace("-", "_")


# The document


def flags_table() -> str:
    """Markdown of what becomes of each flag."""
    rows = [f"| `{name}` | {row.whose} | {row.here()} |" for name, row in FOREIGN.items()]
    for name, values in OURS.items():
        said = [f"`{value}`: `{' '.join(words)}`" for value, words in values.items()]
        rows.append(f"| `{name}` | as here | {'; '.join(said)} |")
    return "\n".join(["| flag | of | here |", "|---|---|---|", *rows])


def defaults_table(parser) -> str:
    """Markdown of the defaults of what both have, ours by `parser`."""
    rows = []
    for ours, (theirs, value) in DEFAULTS.items():
        mine = parser.get_default(ours.removeprefix("--"))
        rows.append(f"| `{ours}` | {mine} | `{theirs}` | {value} |")
    return "\n".join(["| here | default | TRL | default |", "|---|---|---|---|", *rows])
