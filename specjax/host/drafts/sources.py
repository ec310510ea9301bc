"""Sources of drafts on the host.

A source has texts that a request's output may repeat.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from specjax.config import SpeculativeConfig
from specjax.host.drafts.text_index import (
    NOTHING,
    Continuation,
    RecentTexts,
    SuffixLimits,
    TextIndex,
)
from specjax.host.sequence import Sequence as Sample

MAX_OUTPUT_TOKENS = 1_000_000  # of earlier outputs, about 350 bytes each
MAX_NEW_TOKENS = 2048  # maximum number of tokens that a step adds to `OwnText`


class Source(Protocol):
    """A source of drafts on the host: texts that a request's output may repeat.

    Where an output repeats a text, the text's next tokens become drafts.
    """

    @property
    def name(self) -> str:
        """The name under which metrics count the source's drafts."""
        ...

    def begin_step(self) -> None:
        """Prepare for the drafts of a new round: reset the limits on the work per round."""
        ...

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """Return `num_in_flight` expected tokens of a sample, followed by at most `count` drafts.

        The expected tokens are those that the rounds in flight will probably give. The result is
        `NOTHING` if the source has no drafts.
        """
        ...

    def finish(self, sample: Sample) -> None:
        """Tell the source that a sample has finished. The source can then keep the output."""
        ...


class OwnText:
    """The source of drafts whose texts are a sample's own prompt and output."""

    name = "suffix"

    def __init__(self, limits: SuffixLimits):
        self._limits = limits
        self._indexes: WeakKeyDictionary[Sample, TextIndex] = WeakKeyDictionary()
        self._room = MAX_NEW_TOKENS

    def begin_step(self) -> None:
        """See `Source`."""
        self._room = MAX_NEW_TOKENS

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """See `Source`. Return `NOTHING` until all tokens of the sample are indexed.

        A step indexes at most `MAX_NEW_TOKENS` tokens of all samples, so that a long prompt takes
        several steps.
        """
        index = self._indexes.get(sample)
        if index is None:
            index = self._indexes[sample] = TextIndex()
        tokens = sample.token_ids
        new = tokens[len(index) : len(index) + self._room]
        if new:
            index.extend(new)
            self._room -= len(new)
        if len(index) < len(tokens):
            return NOTHING
        return index.continuation(tokens, count, num_in_flight, self._limits)

    def finish(self, sample: Sample) -> None:
        """See `Source`."""
        self._indexes.pop(sample, None)


class _Texts:
    """The base class of sources that have nothing to do at the beginning of a step."""

    def __init__(self, limits: SuffixLimits):
        self._limits = limits

    def begin_step(self) -> None:
        """See `Source`."""

    def finish(self, sample: Sample) -> None:
        """See `Source`."""

    def _continue(
        self, index: TextIndex, sample: Sample, num_in_flight: int, count: int
    ) -> Continuation:
        if not len(index):
            return NOTHING
        return index.continuation(sample.token_ids, count, num_in_flight, self._limits)


class EarlierOutputs(_Texts):
    """The source of drafts whose texts are the outputs of recently finished samples.

    Only samples that stopped or reached their length limit count. About `max_requests` outputs are
    kept, or fewer if they have more than `MAX_OUTPUT_TOKENS` tokens in total.
    """

    name = "suffix"

    def __init__(self, limits: SuffixLimits, max_requests: int):
        super().__init__(limits)
        self._max_requests = max_requests
        self._index = RecentTexts(max_requests, MAX_OUTPUT_TOKENS)

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """See `Source`."""
        return self._continue(self._index, sample, num_in_flight, count)

    def finish(self, sample: Sample) -> None:
        """See `Source`."""
        if self._max_requests and sample.finish_reason in ("stop", "length"):
            self._index.add(sample.output)


class Corpora(_Texts):
    """The source of drafts whose texts are corpora, which users add by name."""

    name = "corpus"

    def __init__(self, limits: SuffixLimits):
        super().__init__(limits)
        self._corpora: dict[str, list[list[int]]] = {}
        self._index = TextIndex()

    @property
    def names(self) -> list[str]:
        """The names of the corpora, in the order in which they were added."""
        return list(self._corpora)

    def add(self, name: str, texts: list[list[int]]) -> None:
        """Add a corpus. Each of its texts is a list of token ids.

        Raises:
            ValueError: there is already a corpus of this name.
        """
        if name in self._corpora:
            raise ValueError(f"corpus {name!r} exists; remove_corpus it first, or name another")
        self._corpora[name] = texts
        for text in texts:
            self._index.add(text)

    def remove(self, name: str) -> None:
        """Remove a corpus, and rebuild the index of all other corpora.

        Raises:
            ValueError: there is no corpus of this name.
        """
        if not isinstance(name, str) or name not in self._corpora:
            raise ValueError(f"corpus {name!r} does not exist; there are {self.names}")
        del self._corpora[name]
        self._index = TextIndex()
        for texts in self._corpora.values():
            for text in texts:
                self._index.add(text)

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """See `Source`."""
        return self._continue(self._index, sample, num_in_flight, count)


class References(_Texts):
    """The source of drafts whose texts come with a request; see `Request.references`."""

    name = "history"

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """See `Source`."""
        index = sample.request.references
        if index is None:
            return NOTHING
        return self._continue(index, sample, num_in_flight, count)


class Replays:
    """The source of drafts from earlier outputs of a prompt; see `Request.replays`.

    A sample's drafts come from the earlier output that was sampled with the same noise. They are
    the next tokens of this output, as long as the sample repeats the output.
    """

    name = "replay"

    def __init__(self):
        self._num_equal: WeakKeyDictionary[Sample, int] = WeakKeyDictionary()  # -1: they differ

    def begin_step(self) -> None:
        """See `Source`."""

    def continuation(self, sample: Sample, num_in_flight: int, count: int) -> Continuation:
        """See `Source`. All drafts are expected to be accepted."""
        replays, known = sample.request.replays, self._num_equal.get(sample, 0)
        if sample.index >= len(replays) or known < 0:
            return NOTHING
        earlier, end = replays[sample.index], sample.num_output
        # Only new tokens: copying the whole output in each round would take quadratic time.
        new = sample.token_ids[sample.num_prompt_tokens + known :]
        is_equal = new == list(earlier[known:end])
        self._num_equal[sample] = end if is_equal else -1
        tokens = list(earlier[end : end + num_in_flight + count])
        if not is_equal or len(tokens) <= num_in_flight:
            return NOTHING
        return Continuation(tokens, float(len(tokens) - num_in_flight))

    def finish(self, sample: Sample) -> None:
        """See `Source`."""
        self._num_equal.pop(sample, None)


def suffix_sources(config: SpeculativeConfig) -> Sequence[Source]:
    """Return the sources of suffix decoding.

    If several sources have equally good drafts, the first source is used.
    """
    limits = SuffixLimits(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    outputs = EarlierOutputs(limits, config.suffix_decoding_max_cached_requests)
    return Replays(), OwnText(limits), References(limits), Corpora(limits), outputs


SOURCES: dict[str, Callable[[SpeculativeConfig], Sequence[Source]]] = {"suffix": suffix_sources}
