"""Keeps rollouts to draft from: later rollouts of a prompt repeat parts of earlier ones."""

import hashlib
import json
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specjax.checkpoint.writing import check_writable
from specjax.checks import check_positive, warn
from specjax.host.drafts.text_index import TextIndex
from specjax.llm import LLM
from specjax.rl.rollouts import Rollout
from specjax.rl.starts import Start

PROMPT_TAIL = 24  # tokens of the prompt before each output, so that an output's start is found
_ARRAYS = "updates", "prompt_lengths", "lengths", "tokens"  # as in a file, after the identity


class RolloutHistory:
    """Keeps rollouts, from which later rollouts of the same prompts are drafted.

    Pass the same history to each `RolloutEngine.generate`. A rollout is drafted from the finished
    rollouts of its prompt: those with the current weights, and those of earlier updates. A history
    does not change outputs. Prompts with the longest earlier rollouts start first.

    Args:
        window: number of earlier updates whose rollouts are kept, for each prompt.
        max_tokens: maximum number of tokens kept; a token takes about 350 bytes. The least recently
            used prompts are forgotten first. The latest prompt is kept even if it is larger.

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, window: int = 2, max_tokens: int = 2_000_000):
        check_positive(window=window, max_tokens=max_tokens)
        self._window, self._max_tokens = window, max_tokens
        self._prompts: OrderedDict[tuple[int, ...], _Prompt] = OrderedDict()
        self._num_tokens = 0
        self._identity: dict[str, Any] = {}
        self._update = 0
        self._version: int | None = None  # of the engine's weights in this update

    def __len__(self) -> int:
        """The number of rollouts kept."""
        return sum(len(prompt.outputs) for prompt in self._prompts.values())

    @property
    def num_tokens(self) -> int:
        """The number of tokens kept, including the end of the prompt before each rollout."""
        return self._num_tokens

    def begin(self, starts: Iterable[Start], llm: LLM, version: int) -> list[Start]:
        """Return `starts`, each with the kept rollouts of its prompt as a source of drafts.

        They are sorted by the mean length of these rollouts, the longest first. `version` is the
        version of the weights. If it has changed, a new update begins.

        Raises:
            ValueError: the engine does not draft from texts, or the kept rollouts are from another
                model, tokenizer or vocabulary.
        """
        if not all(engine.scheduler.suggester.sources for engine in llm.engine.engines):
            raise ValueError(
                "history: the engine does not draft from texts; build it with "
                'speculative_config={"method": "suffix", ...}, or {..., "with": ["suffix"]}'
            )
        self._check(identity_of(llm))
        if version != self._version:
            self._update, self._version = self._update + 1, version
        prompts = [self._prompt(start.request.prompt_token_ids) for start in starts]
        known = [prompt.mean_length for prompt in prompts if prompt.outputs]
        usual = sum(known) / len(known) if known else 0.0
        linked = [
            (prompt, start._replace(request=replace(start.request, references=prompt.index)))
            for prompt, start in zip(prompts, starts, strict=True)
        ]
        linked.sort(key=lambda pair: -(pair[0].mean_length if pair[0].outputs else usual))
        return [start for _, start in linked]

    def add(self, rollout: Rollout) -> None:
        """Keep a rollout if it has ended by "stop" or "length". Ignore it otherwise."""
        if rollout.finish_reason not in ("stop", "length"):
            return
        self._add(rollout.prompt_token_ids.tolist(), rollout.token_ids.tolist(), self._update)

    def _add(self, prompt: list[int], tokens: list[int], update: int) -> None:
        kept = self._prompt(tuple(prompt))
        before = len(kept.index)
        kept.add(prompt[-PROMPT_TAIL:], tokens, update, self._window)
        self._num_tokens += len(kept.index) - before
        while self._num_tokens > self._max_tokens and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= len(oldest.index)

    def _prompt(self, tokens: tuple[int, ...]) -> "_Prompt":
        """Return the rollouts of a prompt, and mark the prompt as the most recently used."""
        kept = self._prompts.pop(tokens, None) or _Prompt()
        self._prompts[tokens] = kept
        return kept

    def _check(self, identity: Mapping[str, Any]) -> None:
        """Raise a ValueError if the kept rollouts are from an engine with another `identity_of`."""
        for name, value in self._identity.items():
            if identity[name] != value:
                raise ValueError(
                    f"history: it has rollouts of another {name} ({value}, here {identity[name]}); "
                    "begin a new RolloutHistory"
                )
        self._identity = dict(identity)

    def state(self) -> dict[str, np.ndarray]:
        """Return all rollouts as arrays, for a trainer's checkpoint. `of` reads them."""
        rows = [
            (update, prompt, output)
            for prompt, kept in self._prompts.items()
            for update, output in kept.outputs
        ]
        flat = [token for _, prompt, output in rows for token in (*prompt, *output)]
        identity = json.dumps({**self._identity, "update": self._update}).encode()
        return {
            "identity": np.frombuffer(identity, np.uint8),
            "updates": np.array([update for update, _, _ in rows], np.int64),
            "prompt_lengths": np.array([len(prompt) for _, prompt, _ in rows], np.int64),
            "lengths": np.array([len(output) for _, _, output in rows], np.int64),
            "tokens": np.array(flat, np.int32),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], **options: Any) -> "RolloutHistory":
        """Return a new history with the rollouts in a result of `state`.

        `options` are the arguments of the class.

        Raises:
            ValueError: `state` is not a result of the method `state`, or an option is invalid.
        """
        try:
            identity = json.loads(bytes(np.asarray(state["identity"])))
            updates, *lengths, tokens = (np.asarray(state[name]).tolist() for name in _ARRAYS)
            ends = np.cumsum(np.sum(lengths, axis=0, dtype=np.int64)).tolist()
            update = identity.pop("update")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is not the state of a RolloutHistory: {error!r}") from error
        history = cls(**options)
        history._identity, history._update = identity, update
        start = 0
        for number, length, end in zip(updates, lengths[0], ends, strict=True):
            if end > len(tokens):
                break
            history._add(tokens[start : start + length], tokens[start + length : end], number)
            start = end
        return history

    def save(self, path: str | Path) -> None:
        """Write all rollouts to a file.

        Raises:
            ValueError: the folder of `path` does not exist.
        """
        check_writable("path", Path(path))
        state = self.state()
        with open(path, "wb") as file:
            for array in state.values():  # tokens are last: rollouts before a cut stay usable
                np.save(file, array, allow_pickle=False)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> "RolloutHistory":
        """Return a new history with the rollouts in a file that `save` wrote.

        `options` are the arguments of the class. If the file was cut short, its complete rollouts
        are used, and a warning says how many there are.

        Raises:
            ValueError: the file has no complete rollout, or an option is invalid.
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            try:
                state = {"identity": np.load(file), **{n: np.load(file) for n in _ARRAYS[:-1]}}
                state["tokens"] = _whole_items(file)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{path} has no whole rollout: {error}") from error
        history = cls.of(state, **options)
        ends = np.cumsum(state["prompt_lengths"] + state["lengths"])
        num_whole = int(np.sum(ends <= len(state["tokens"])))
        if num_whole < len(ends):
            warn(f"{path} was cut short: {num_whole} of its {len(ends)} rollouts are whole")
        return history


class _Prompt:
    """The kept rollouts of a prompt, oldest first, and an index of their texts."""

    def __init__(self):
        self.index = TextIndex()
        self.outputs: deque[tuple[int, list[int]]] = deque()  # with the numbers of their updates
        self._sizes: deque[int] = deque()  # numbers of tokens in the index

    @property
    def mean_length(self) -> float:
        """The mean number of tokens of an output."""
        return sum(len(tokens) for _, tokens in self.outputs) / len(self.outputs)

    def add(self, before: list[int], tokens: list[int], update: int, window: int) -> None:
        """Add an output of an update, and forget the outputs of updates that are too old.

        The latest update and `window` earlier ones are kept; updates without this prompt do not
        count. `before` has the last tokens of the prompt.
        """
        self.index.add([*before, *tokens])
        self.outputs.append((update, tokens))
        self._sizes.append(len(before) + len(tokens) + 1)
        kept = sorted({number for number, _ in self.outputs})[-window - 1 :]
        while self.outputs[0][0] < kept[0]:
            self.outputs.popleft()
            self.index.forget(self._sizes.popleft())


def identity_of(llm: LLM) -> dict[str, Any]:
    """Return the vocabulary size, and digests of model and tokenizer.

    Engines may share a history only if these are equal.
    """
    digests = {"model": re.sub(r"num_devices=\d+", "", repr(llm.target)), "tokenizer": ""}
    if llm.tokenizer is not None:
        digests["tokenizer"] = llm.tokenizer.tokenizer.to_str()
    found = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in digests.items()}
    return {"vocabulary": llm.target.vocab_size, **found}


def _whole_items(file: BinaryIO) -> np.ndarray:
    """Read a one-dimensional array from an .npy file; if the file was cut, the items before it."""
    np.lib.format.read_magic(file)
    _, _, dtype = np.lib.format.read_array_header_1_0(file)
    content = file.read()
    return np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
