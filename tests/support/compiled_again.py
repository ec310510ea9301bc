"""Checks that stored reports of compiled functions are still right."""

import random

from support.seeds import VARIABLE

from specjax.inspect.compile import compile_functions
from specjax.inspect.kept import Kept


def compile_again(kept: Kept, seed: int) -> None:
    """Compile one of the functions whose stored report was used, and compare the new report.

    The seed determines which function is compiled.
    """
    if not kept.used:
        return
    arguments, report = random.Random(seed).choice(kept.used)
    (made,) = compile_functions(**arguments)
    apart = "seconds", "is_kept"
    names = [name for name in made if name not in apart and made[name] != report[name]]
    request, remedy = arguments["requests"][0], f"delete {kept.folder}"
    assert not names, f"{VARIABLE}={seed}: {request} has other {names} than kept; {remedy}"
