"""The check-up of a drafter: how often its drafts would be accepted, and whether they would be more
often if something about it were different.

The target is run over whole texts without a cache. At places of each text the drafter, through the
contract that serving uses, drafts from the target's features so far; a draft is accepted if it is
the target's own choice. Then the same is done with other auxiliary layers, features, mask tokens
and vocabularies. One that is accepted clearly more often names a fault.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.device.cache.kind import CacheSizes
from specjax.device.cache.rows import CachedRows
from specjax.device.drafters.drafter import (
    DraftContext,
    Drafter,
    Observation,
    Params,
    Variant,
)
from specjax.device.edits import History
from specjax.device.models.model import Features, Model
from specjax.device.requests import init_requests
from specjax.train.context import CausalRows

NUM_PLACES = 32  # of a text, at which drafts are made
PAGE_SIZE, LENGTHS = 16, 128  # texts are padded to a multiple, so that few programs are compiled
# What is clearly better gains at least so many tokens a step, and so many standard errors: more
# of them on other texts, whose places are not the same ones.
LEAST_GAIN, LEAST_ERRORS, LEAST_ERRORS_UNPAIRED = 0.05, 2.5, 3.0


class Text(NamedTuple):
    """A prompt and the target's answer to it."""

    tokens: np.ndarray  # i32[n]
    num_prompt: int


class Trial(NamedTuple):
    """A drafter, and what it is given."""

    name: str
    drafter: Drafter
    params: Any  # the drafter's
    layers: tuple[int, ...]  # whose input it reads
    shift: int = 0  # it reads features of so many rows later
    fault: str = ""  # what is wrong if this is better than the drafter as it is


class Tally(NamedTuple):
    """What was accepted at P places of all texts."""

    is_accepted: np.ndarray  # bool[P, K], with all drafts before it
    is_counted: np.ndarray  # bool[P, K], whether the text goes on as the target would

    @property
    def rates(self) -> list[float]:
        """Of drafts at position 1, 2, ... the part accepted."""
        counts = np.maximum(self.is_counted.sum(0), 1)
        return ((self.is_accepted & self.is_counted).sum(0) / counts).tolist()

    @property
    def length(self) -> float:
        """Tokens per step: the accepted ones, and one of the target's."""
        return 1 + sum(self.rates)

    @property
    def accepted(self) -> np.ndarray:
        """Drafts accepted at each place, f64[P]."""
        return (self.is_accepted & self.is_counted).sum(1).astype(np.float64)

    def is_clearly_below(self, other: "Tally", *, is_paired: bool) -> bool:
        """Return whether another tally, of the same places if paired, is better beyond chance."""
        ours, theirs = self.accepted, other.accepted
        if is_paired:
            variance, errors = (theirs - ours).var() / len(ours), LEAST_ERRORS
        else:
            variance = ours.var() / len(ours) + theirs.var() / len(theirs)
            errors = LEAST_ERRORS_UNPAIRED
        gain = theirs.mean() - ours.mean()
        return bool(gain > max(LEAST_GAIN, errors * variance**0.5))


class Checkup(NamedTuple):
    """The result: the drafter as it is, all that was tried, and the faults found."""

    reference: Tally
    tried: dict[str, Tally]  # by name
    faults: list[str]


def check(
    target: Model,
    params: Params,
    drafter: Drafter,
    texts: Sequence[Text],
    k: int,
    *,
    mask_ids: Sequence[int] = (),
    vocabularies: Mapping[str, np.ndarray] | None = None,
) -> Checkup:
    """Check a drafter on texts that the target wrote.

    Args:
        mask_ids: tokens to try as the mask of a drafter that has one.
        vocabularies: token ids i32[V_d] to try as the draft vocabulary, by where they are from.

    Raises:
        ValueError: no text has an answer of more than k + 1 tokens.
    """
    own = Trial("as it is", drafter, params.drafter, drafter.aux_layers)
    trials = [own, *alternatives(own, target, mask_ids, vocabularies or {})]
    tallies = measure(target, params.target, trials, texts, k)
    reference = tallies.pop(own.name)
    return Checkup(reference, tallies, _name_faults(reference, tallies, trials[1:]))


def measure(
    target: Model, params: Any, trials: Sequence[Trial], texts: Sequence[Text], k: int
) -> dict[str, Tally]:
    """Return what is accepted of each trial, by its name; `params` are the target's.

    Raises:
        ValueError: no text has an answer of more than k + 1 tokens.
    """
    pairs = [(text, starts) for text in texts if (starts := _places(text, k)) is not None]
    if not pairs:
        raise ValueError(f"no answer is longer than {k + 1} tokens, so there is nothing to check")
    longest = max(len(text.tokens) for text, _ in pairs)
    length = -(-(longest + k + 1) // LENGTHS) * LENGTHS
    layers = tuple(sorted({layer for trial in trials for layer in trial.layers}))
    parts: dict[str, list[Tally]] = {trial.name: [] for trial in trials}
    for text, starts in pairs:
        tokens = jnp.array(np.pad(text.tokens, (0, length - len(text.tokens))), jnp.int32)
        hidden, entering, best = _read(params, tokens, target=target, layers=layers)
        for trial in trials:
            chosen = [entering[layers.index(layer)] for layer in trial.layers]
            features = Features.of(hidden, chosen)
            features = jax.tree.map(partial(jnp.roll, shift=-trial.shift, axis=0), features)
            drafts = _draft(
                Params(params, trial.params),
                *(tokens, features, jnp.array(starts)),
                target=target,
                drafter=trial.drafter,
                k=k,
            )
            parts[trial.name].append(_compare(drafts, tokens, best, starts))
    return {
        name: Tally(*map(np.concatenate, zip(*found, strict=True))) for name, found in parts.items()
    }


def alternatives(
    own: Trial, target: Model, mask_ids: Sequence[int], vocabularies: Mapping[str, np.ndarray]
) -> Iterator[Trial]:
    """Yield what a drafter is tried with besides what it is."""
    for step in (-1, 1) if own.layers else ():
        layers = tuple(layer + step for layer in own.layers)
        if min(layers) >= 0 and max(layers) <= target.num_layers:
            name = f"layers {', '.join(map(str, layers))}"
            fault = f"wrong auxiliary layers: {own.layers} are read, {layers} are better"
            yield own._replace(name=name, layers=layers, fault=fault)
    for shift, where in (-1, "before"), (1, "after"):
        fault = f"features are shifted by one: those of the row {where} are better"
        yield own._replace(name=f"features of the row {where}", shift=shift, fault=fault)
    drafter: Any = own.drafter
    mask = getattr(getattr(drafter, "head", None), "mask_token_id", None)
    for token in mask_ids if mask is not None else ():
        if token != mask:
            other = replace(drafter, head=replace(drafter.head, mask_token_id=token))
            fault = f"wrong mask token: {mask} is read where it drafts, {token} is better"
            yield own._replace(name=f"mask token {token}", drafter=other, fault=fault)
    ids = getattr(own.params, "target_ids", None)
    if ids is not None:
        read_as_ids = np.asarray(ids) - np.arange(len(ids))
        for name, found in {"d2t read as ids": read_as_ids, **vocabularies}.items():
            if len(found) != len(ids) or found.min() < 0 or found.max() >= target.vocab_size:
                continue
            if (found != np.asarray(ids)).any():
                other = replace(own.params, target_ids=jnp.array(found, ids.dtype))
                fault = f"d2t is missing or wrong: the draft vocabulary of {name} is better"
                yield own._replace(name=name, params=other, fault=fault)


def _name_faults(
    reference: Tally, tallies: Mapping[str, Tally], trials: Sequence[Trial]
) -> list[str]:
    """Return the fault that explains most; others than the best are what it would look like."""
    better = [s for s in trials if reference.is_clearly_below(tallies[s.name], is_paired=True)]
    if not better:
        return []
    best = max(better, key=lambda trial: tallies[trial.name].length)
    return [f"{best.fault} ({tallies[best.name].length:.2f} against {reference.length:.2f})"]


def _places(text: Text, k: int) -> np.ndarray | None:
    """Return where drafts are made: positions i32[NUM_PLACES] of known tokens of the answer."""
    last = len(text.tokens) - k - 1
    if last < text.num_prompt:
        return None
    return np.linspace(text.num_prompt, last, NUM_PLACES).astype(np.int32)


@partial(jax.jit, static_argnames=("target", "layers"))
def _read(
    params: Any, tokens: jax.Array, *, target: Model, layers: tuple[int, ...]
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Return the target's hidden states [T, D], those entering `layers`, and its choices i32[T]."""
    features, _ = target.extend(params, tokens, CausalRows.of(1, len(tokens)), None, layers)
    best = target.logits(params, features.hidden).argmax(-1).astype(jnp.int32)
    auxiliary = features.auxiliary
    return features.hidden, [] if auxiliary is None else jnp.split(auxiliary, len(layers), -1), best


@partial(jax.jit, static_argnames=("target", "drafter", "k"))
def _draft(
    params: Params,
    tokens: jax.Array,
    features: Features,
    starts: jax.Array,
    *,
    target: Model,
    drafter: Drafter,
    k: int,
) -> jax.Array:
    """Return drafts i32[N, k] after tokens up to each of `starts`, every place a request."""
    count, length = len(starts), len(tokens)
    num_pages = length // PAGE_SIZE
    table = jnp.arange(count * num_pages, dtype=jnp.int32).reshape(count, num_pages)
    slots, known = jnp.arange(count, dtype=jnp.int32), jnp.tile(tokens, (count, 1))
    rows = CachedRows.starting_at(jnp.zeros_like(starts), starts, length, table)
    every = jax.tree.map(lambda x: jnp.tile(x, (count, 1)), features)
    following = jnp.roll(known, -1, axis=1)
    seen = Observation(slots, rows, known, following, every, starts - 1, None)
    sizes = CacheSizes(count, count * num_pages, PAGE_SIZE, 1)
    state = drafter.init_state(sizes, features.hidden.dtype)
    state = drafter.observe(target, params, state, seen)
    context = DraftContext(
        slots=slots,
        starts=starts,
        is_active=jnp.ones(count, bool),
        page_table=table,
        requests=init_requests(count, target.vocab_size),  # greedy
        history=History(known, starts + 1),
        wants_edits=jnp.array(False),
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(),
    )
    return drafter.draft(target, params, state, context, k)[0].tokens


def _compare(drafts: jax.Array, tokens: jax.Array, best: jax.Array, starts: np.ndarray) -> Tally:
    spots = starts[:, None] + np.arange(1, drafts.shape[1] + 1)
    chosen = np.asarray(best)[spots - 1]
    is_accepted = np.logical_and.accumulate(np.asarray(drafts) == chosen, axis=1)
    goes_on = np.logical_and.accumulate(np.asarray(tokens)[spots] == chosen, axis=1)
    is_counted = np.concatenate([np.ones_like(goes_on[:, :1]), goes_on[:, :-1]], axis=1)
    return Tally(is_accepted, is_counted)
