"""Whether a function that was kept is what would be compiled now."""

import random

from support.seeds import VARIABLE

from specjax.inspect.compile import compile_functions
from specjax.inspect.kept import Kept


def compile_again(kept: Kept, seed: int) -> None:
    """Compile again one function, chosen at random, that was taken from `kept`; compare reports."""
    if not kept.used:
        return
    arguments, report = random.Random(seed).choice(kept.used)
    (made,) = compile_functions(**arguments)
    apart = "seconds", "is_kept"
    names = [name for name in made if name not in apart and made[name] != report[name]]
    request, remedy = arguments["requests"][0], f"delete {kept.folder}"
    assert not names, f"{VARIABLE}={seed}: {request} has other {names} than kept; {remedy}"
