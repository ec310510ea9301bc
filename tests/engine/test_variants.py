"""Variants of programs: which variants cover a step's needs, and which programs a plan runs."""

import itertools

from support.logits import double, halve

from specjax.device.drafters.drafter import Variant
from specjax.engine import programs
from specjax.engine.programs import Begin, Decode, Extend, Observe, Prefill, Propose, Settle
from specjax.engine.variants import covers, first_programs_of, programs_of
from specjax.host.plans import DecodePlan, PrefillPlan

EVERY = Variant(num_logprobs=20)  # what every engine compiles


EVERY_VARIANT = [
    Variant(*fields)
    for fields in itertools.product(
        ((), ((0, (double,)),), ((1, (halve,)),), ((0, (double,)), (1, (halve,)))),
        (False, True),
        (0, 20, 50),
        (None, 0, 50),
    )
]


def does(variant):
    """Return the optional work of a variant, except masks, as a set."""
    features = {*variant.processors, *([] if variant.is_plain else ["edits"])}
    for name in "num_logprobs", "num_prompt_logprobs":
        count = getattr(variant, name)
        features |= {(name, n) for n in (0, 20, 50) if count is not None and n <= count}
    return features


def test_a_variant_covers_what_it_does_and_less():
    """Masks are an exception: a step with masks waits for them, and other steps have none."""
    for variant, needed in itertools.product([*EVERY_VARIANT, Variant(is_plain=True)], repeat=2):
        expected = does(variant) >= does(needed) and variant.masks == needed.masks
        assert covers(variant, needed) == expected


def test_a_plan_names_its_programs():
    """The program that admits requests does not depend on the width of their chunks."""
    variant = Variant(num_logprobs=20, num_prompt_logprobs=3)
    chunks, decode = PrefillPlan((), 2, 32), DecodePlan((), 4, 3, 2)
    expected = [programs.Admit(2), Prefill(2, 32), Begin(2, 32, variant)]
    assert programs_of(chunks, variant, is_recurrent=False, defers=True) == expected
    assert programs_of(chunks, variant, is_recurrent=True, defers=True) == [
        *expected,
        programs.Restore(2),
        programs.Take(2),
    ]
    # Prompts are not a round's business.
    assert programs_of(decode, variant, is_recurrent=True, defers=True) == [Decode(4, 3, EVERY)]
    # A round without drafts may leave something for a program of its own, in pieces or not.
    decode, whole = DecodePlan((), 4, 0, 0), Decode(4, 0, EVERY)
    assert programs_of(decode, variant, is_recurrent=True, defers=True) == [Observe(4), whole]
    assert programs_of(decode, variant, is_recurrent=True, defers=False) == [whole]
    assert Observe(4) in first_programs_of(decode, variant, is_recurrent=True, defers=True)


def test_variants_share_the_programs_that_run_the_target():
    """Drafting edits logits like verification, but reports nothing, and needs masks later."""
    decode, halved = DecodePlan((), 4, 3, 3), ((0, (halve,)),)
    for variant in Variant((), True, 20), Variant(num_logprobs=50), Variant(halved, True, 20):
        settle = Settle(4, 3, variant._replace(masks=False, processors=()))
        parts = [Propose(4, 3, Variant(variant.processors)), Extend(4, 3), settle]
        if variant.processors:
            parts.append(programs.ProcessRound(4, 3, halved))
        assert programs_of(decode, variant, is_recurrent=False, defers=True) == parts


def test_processors_are_in_begin_only_where_prompts_are_scored():
    chunks, halved = PrefillPlan((), 2, 32), ((0, (halve,)),)
    shared = [programs.Admit(2), Prefill(2, 32)]
    for num_scored, begun in (None, ()), (3, halved):
        variant = Variant(halved, True, 20, num_scored)
        begin = Begin(2, 32, Variant(begun, False, 20, num_scored))
        found = programs_of(chunks, variant, is_recurrent=False, defers=True)
        assert found == [*shared, begin, programs.ProcessFirst(2, halved)]
