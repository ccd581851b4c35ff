"""Objects of the user, named on the command line as "module:name"."""

import pkgutil
from collections.abc import Callable


def load_named(flag: str, spec: str, noun: str, is_valid: Callable) -> Callable:
    """Return the user's object that "module:name" names.

    Args:
        noun: "function" or "class", for the error message; is_valid: tests the object.

    Raises:
        ValueError: wrong form, no such module or object; names the flag and the spec.
    """
    try:
        loaded = pkgutil.resolve_name(spec)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {spec}: {error}") from error
    except SystemExit as error:
        raise ValueError(f"{flag} {spec}: its module calls sys.exit when imported") from error
    if not is_valid(loaded):
        raise ValueError(f"{flag} {spec}: must be module:{noun}, such as my_module:my_{noun}")
    return loaded
