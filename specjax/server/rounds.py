"""Reports rounds of speculation, so that clients can tell accepted drafts from other tokens."""

from collections import defaultdict

from specjax.outputs import CompletionOutput
from specjax.server.wire import DraftRound
from specjax.text.tokenizer import MAX_TOKENS_PER_CHARACTER, ChatTokenizer


class RoundReports:
    """Splits a sample's tokens into rounds: accepted draft tokens, then one token of the target."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)

    def of(self, index: int, sample: CompletionOutput) -> list[DraftRound]:
        """Return the rounds of the new tokens in `sample`. `index` is the sample's index."""
        known = self._token_ids[index]
        start = len(known)
        known += sample.token_ids
        rounds = []
        for num_drafts, num_accepted in zip(sample.rounds[::2], sample.rounds[1::2], strict=True):
            end = start + num_accepted + 1
            rounds.append(DraftRound(num_drafts, [self._text(known, i) for i in range(start, end)]))
            start = end
        return rounds

    def _text(self, token_ids: list[int], i: int) -> str:
        before = token_ids[max(0, i - MAX_TOKENS_PER_CHARACTER) : i]
        return self._tokenizer.decode_token(token_ids[i], before)
