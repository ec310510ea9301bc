"""Lists the programs that run a plan, given its shape and its variant.

A variant is a set of request options, such as log-probabilities, that programs support.
"""

from specjax.device.drafters.drafter import Variant
from specjax.engine.batch import Part
from specjax.engine.programs import (
    Admit,
    Begin,
    Decode,
    Extend,
    Observe,
    Prefill,
    ProcessFirst,
    ProcessRound,
    Propose,
    Restore,
    Settle,
    Take,
)
from specjax.engine.tracing import Program
from specjax.host.plans import DecodePlan, PrefillPlan

FEW_LOGPROBS = 20  # number of likeliest tokens that every step can report


def programs_of(plan: Part, variant: Variant, *, is_recurrent: bool, defers: bool) -> list[Program]:
    """Return the programs that run a plan fastest, with the request options of a variant.

    `is_recurrent` means that the target or the drafter has recurrent states. `defers` means that a
    round without drafts does not update the drafter's cache. The program `Observe` later updates
    the cache with several such rounds.
    """
    batch = plan.batch
    if isinstance(plan, PrefillPlan):
        found: list[Program] = [Admit(batch), Prefill(batch, plan.width)]
        found.append(Begin(batch, plan.width, of_begin(variant)))
        if variant.processors:
            found.append(ProcessFirst(batch, variant.processors))
        return [*found, Restore(batch), Take(batch)] if is_recurrent else found
    variant = of_rounds(variant)
    if is_in_pieces(variant):
        found = _pieces(plan, Propose(batch, plan.k, of_drafts(variant)), variant)
    else:
        found = [Decode(batch, plan.k, variant)]
    return [Observe(batch), *found] if defers and not plan.k else found


def first_programs_of(
    plan: Part, variant: Variant, *, is_recurrent: bool, defers: bool
) -> list[Program]:
    """Return the programs that run a plan until its fastest programs are compiled.

    A variant is a set of request options. The returned programs are slower than the programs that
    `programs_of` returns, but all variants share most of them. So requests that need a new variant
    do not wait long. Rounds run as several programs, and drafts are made without logits
    processors, so that fewer drafts are accepted.
    """
    if isinstance(plan, PrefillPlan):
        return programs_of(plan, variant, is_recurrent=is_recurrent, defers=defers)
    found = _pieces(plan, Propose(plan.batch, plan.k, Variant()), of_rounds(variant))
    return [Observe(plan.batch), *found] if defers and not plan.k else found


def _pieces(plan: DecodePlan, propose: Propose, variant: Variant) -> list[Program]:
    batch, k = plan.batch, plan.k
    found: list[Program] = [propose, Extend(batch, k), Settle(batch, k, of_settle(variant))]
    return [*found, ProcessRound(batch, k, variant.processors)] if variant.processors else found


def is_in_pieces(variant: Variant) -> bool:
    """Return whether rounds of a variant always run as several programs.

    A variant is a set of request options, such as grammar masks. All variants whose rounds run
    as several programs share the program that runs the target.
    """
    return variant.masks or bool(variant.processors) or variant.num_logprobs > FEW_LOGPROBS


def of_rounds(variant: Variant) -> Variant:
    """Return a variant (a set of request options) without log-probabilities of prompts.

    Rounds never need these log-probabilities, so fewer programs are compiled.
    """
    return variant._replace(num_prompt_logprobs=None)


def of_begin(variant: Variant) -> Variant:
    """Return a variant with only the fields that are compiled into the program `Begin`.

    Masks are left out, because `Begin` takes them as an argument. Logits processors run in another
    program before `Begin`. So they are left out, too, except if log-probabilities of prompt tokens
    are wanted.
    """
    scored = variant.num_prompt_logprobs is not None
    return variant._replace(masks=False, processors=variant.processors if scored else ())


def of_settle(variant: Variant) -> Variant:
    """Return a variant with only the fields that are compiled into `Settle`; see `of_begin`."""
    return variant._replace(masks=False, processors=())


def of_drafts(variant: Variant) -> Variant:
    """Return a variant with only the fields that drafting needs: `processors` and `is_plain`."""
    return Variant(variant.processors, is_plain=variant.is_plain)


def covers(variant: Variant, asked: Variant) -> bool:
    """Return whether programs of `variant` support all request options in `asked`.

    Both variants or neither must have grammar masks, because a step with masks waits for the host.
    """
    return (
        set(variant.processors) >= set(asked.processors)
        and variant.masks == asked.masks
        and variant.num_logprobs >= asked.num_logprobs
        and _or_none(variant.num_prompt_logprobs) >= _or_none(asked.num_prompt_logprobs)
        and (asked.is_plain or not variant.is_plain)
    )


def _or_none(count: int | None) -> int:
    return -1 if count is None else count
