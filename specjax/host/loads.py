"""Describes the next round's load, from which a policy chooses the number of drafts."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from specjax.host.drafts.suggester import Suggester
from specjax.host.sequence import Sequence
from specjax.host.shapes import Shapes
from specjax.host.speculation.policy import Policy
from specjax.host.speculation.requests import ReadyRequests
from specjax.host.speculation.rounds import DecodeLoad, SplitShape


def load_of(
    ready: SequenceOf[Sequence],
    policy: Policy,
    max_tokens: int,
    shapes: Shapes,
    splits: Collection[SplitShape] | None,
    suggester: Suggester,
) -> DecodeLoad:
    """Return the load of a round of the sequences `ready`.

    If `policy.weighs_requests` is False, the load has only the number of sequences and the token
    budget.

    Args:
        max_tokens: the step's token budget.
        shapes: the shapes whose programs are compiled.
        splits: the compiled shapes of split rounds, in which only some requests draft; None if the
            round may not be split.
        suggester: searches texts for drafts, if it has sources.
    """
    if not policy.weighs_requests:
        return DecodeLoad(len(ready), 0, max_tokens)
    k, lengths = max(policy.choices), [len(sequence.token_ids) for sequence in ready]
    limits = [  # the first case, without a call, is the usual one
        k if s.draft_limit >= k < s.max_length - n - s.num_in_flight
        else s.max_drafts(k, n + s.num_in_flight)
        for s, n in zip(ready, lengths, strict=True)
    ]  # fmt: skip
    requests = ReadyRequests(
        [sequence.rank for sequence in ready],
        [sequence.request.group for sequence in ready],
        lengths,
        limits,
        suggester.expect(ready) if suggester.sources and ready else None,
    )
    return DecodeLoad(len(ready), sum(lengths), max_tokens, requests, splits, shapes.decode)
