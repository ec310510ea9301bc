"""Checks how often a drafter's drafts are accepted, and whether another setup would help.

The target runs over whole texts without a cache. At several tokens of each text, called places, the
drafter drafts the next tokens, from the target's features up to the place. The drafter is called as
in serving. A draft is accepted if it is the target's choice. Trials repeat this with other
auxiliary layers, features, mask tokens and vocabularies. A trial that is clearly better than the
unchanged drafter reveals a fault.

Each trial gives two figures: the number of accepted drafts, and the overlap of the drafter's and
the target's distributions, which is the acceptance rate of sampled drafts at temperature 1. The
number of accepted drafts differs much from place to place, and reveals small faults only with many
texts. The overlap differs less.
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
from specjax.device.verification import draft_probs
from specjax.train.context import CausalRows

NUM_PLACES = 32  # number of places per text at which drafts are made
PAGE_SIZE, LENGTHS = 16, 128  # texts are padded to multiples of LENGTHS, to compile few programs
SHIFTS = -2, -1, 1, 2  # shifts of auxiliary layers to try; conventions of counting differ by 1
# A trial is clearly better if its acceptance length or its overlap is higher by at least this
# difference, and by this number of standard errors. Unpaired trials, which ran on other texts, need
# more standard errors.
LEAST_GAIN, LEAST_IN_COMMON = 0.05, 0.01
LEAST_ERRORS, LEAST_ERRORS_UNPAIRED = 2.5, 3.0


class Text(NamedTuple):
    """A prompt and the target's answer to it."""

    tokens: np.ndarray  # i32[n]
    num_prompt: int


class Trial(NamedTuple):
    """A drafter with its parameters, and the layers whose hidden states the drafter reads."""

    name: str
    drafter: Drafter
    params: Any  # the drafter's parameters
    layers: tuple[int, ...]  # the drafter reads the inputs of these layers
    shift: int = 0  # the drafter reads features from this number of rows ahead
    fault: str = ""  # the fault to report if this trial is clearly better


class Tally(NamedTuple):
    """The results of one trial, at P places (token positions) in all texts together."""

    is_accepted: np.ndarray  # bool[P, K], whether the draft and all before it are accepted
    is_counted: np.ndarray  # bool[P, K], whether the text up to the draft is the target's choice
    in_common: np.ndarray  # f64[P], overlap for the first draft: sum of min(p, q) over tokens

    @property
    def rates(self) -> list[float]:
        """For each of the K draft positions, the fraction of places that accept the draft.

        A place counts only if the text up to the draft is the target's choice.
        """
        counts = np.maximum(self.is_counted.sum(0), 1)
        return ((self.is_accepted & self.is_counted).sum(0) / counts).tolist()

    @property
    def length(self) -> float:
        """The acceptance length: the expected number of accepted drafts per round, plus 1."""
        return 1 + sum(self.rates)

    @property
    def accepted(self) -> np.ndarray:
        """The number of accepted drafts at each of the P places, f64[P]."""
        return (self.is_accepted & self.is_counted).sum(1).astype(np.float64)

    def is_clearly_below(self, other: "Tally", *, is_paired: bool) -> bool:
        """Return whether `other` is better than this tally by more than chance.

        `is_paired` means that both tallies come from the same places of the texts, in the same
        order.
        """
        least_errors = LEAST_ERRORS if is_paired else LEAST_ERRORS_UNPAIRED
        for ours, theirs, least in (
            (self.accepted, other.accepted, LEAST_GAIN),
            (self.in_common, other.in_common, LEAST_IN_COMMON),
        ):
            if is_paired:
                variance = (theirs - ours).var() / len(ours)
            else:
                variance = ours.var() / len(ours) + theirs.var() / len(theirs)
            if theirs.mean() - ours.mean() > max(least, least_errors * variance**0.5):
                return True
        return False


class Checkup(NamedTuple):
    """The tallies of a drafter and of its trials, and the faults found."""

    reference: Tally  # the tally of the unchanged drafter
    tried: dict[str, Tally]  # the tallies of the trials, by name
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
        k: the number of drafts at each place.
        mask_ids: token ids. If the drafter has a mask token, each id is tried as the mask token.
        vocabularies: draft vocabularies to try. A key names the source of a vocabulary. The value
            i32[V_d] holds the target's token id of each of the drafter's V_d tokens.

    Raises:
        ValueError: no text has an answer of at least k + 1 tokens.
    """
    own = Trial("as it is", drafter, params.drafter, drafter.aux_layers)
    trials = [own, *alternatives(own, target, mask_ids, vocabularies or {})]
    tallies = measure(target, params.target, trials, texts, k)
    reference = tallies.pop(own.name)
    return Checkup(reference, tallies, _name_faults(reference, tallies, trials[1:]))


def measure(
    target: Model, params: Any, trials: Sequence[Trial], texts: Sequence[Text], k: int
) -> dict[str, Tally]:
    """Return the tally of each trial by name.

    `params` are the target's parameters.

    Raises:
        ValueError: no text has an answer of at least k + 1 tokens.
    """
    pairs = [(text, starts) for text in texts if (starts := _places(text, k)) is not None]
    if not pairs:
        raise ValueError(f"no answer has {k + 1} tokens or more, so there is nothing to check")
    longest = max(len(text.tokens) for text, _ in pairs)
    length = -(-(longest + k + 1) // LENGTHS) * LENGTHS
    layers = tuple(sorted({layer for trial in trials for layer in trial.layers}))
    parts: dict[str, list[Tally]] = {trial.name: [] for trial in trials}
    for text, starts in pairs:
        tokens = jnp.array(np.pad(text.tokens, (0, length - len(text.tokens))), jnp.int32)
        places = jnp.array(starts)
        read = _read(params, tokens, places, target=target, layers=layers)
        hidden, entering, best, probs = read
        for trial in trials:
            chosen = [entering[layers.index(layer)] for layer in trial.layers]
            features = Features.of(hidden, chosen)
            features = jax.tree.map(partial(jnp.roll, shift=-trial.shift, axis=0), features)
            drafts, guessed = _draft(
                Params(params, trial.params),
                *(tokens, features, places),
                target=target,
                drafter=trial.drafter,
                k=k,
            )
            in_common = np.minimum(guessed, probs).sum(-1, dtype=np.float64)
            parts[trial.name].append(_compare(drafts, tokens, best, starts, in_common))
    return {
        name: Tally(*map(np.concatenate, zip(*found, strict=True))) for name, found in parts.items()
    }


def alternatives(
    own: Trial, target: Model, mask_ids: Sequence[int], vocabularies: Mapping[str, np.ndarray]
) -> Iterator[Trial]:
    """Yield trials of the drafter, each with another value of one setting.

    Settings are, for example, the auxiliary layers, the mask token and the draft vocabulary. `own`
    is the trial of the unchanged drafter.
    """
    for step in SHIFTS if own.layers else ():
        layers = tuple(layer + step for layer in own.layers)
        if min(layers) >= 0 and max(layers) <= target.num_layers:
            name = f"layers {', '.join(map(str, layers))}"
            fault = f"wrong auxiliary layers: {own.layers} are read, {layers} are better"
            yield own._replace(name=name, layers=layers, fault=fault)
    for shift, where in (-1, "before"), (1, "after"):
        fault = f"features are shifted by one: features of the row {where} are better"
        yield own._replace(name=f"features of the row {where}", shift=shift, fault=fault)
    drafter: Any = own.drafter
    head = getattr(drafter, "head", None)
    mask = getattr(head, "mask_token_id", None)  # None for heads that recycle their state
    if mask is None and hasattr(head, "recycle_normed"):
        yield _other_recycling(own, drafter)
    for token in mask_ids if mask is not None else ():
        if token != mask:
            other = replace(drafter, head=replace(drafter.head, mask_token_id=token))
            fault = f"wrong mask token: {mask} is used, {token} is better"
            yield own._replace(name=f"mask token {token}", drafter=other, fault=fault)
    ids = getattr(own.params, "target_ids", None)
    if ids is not None:
        own_ids, places = np.asarray(ids), np.arange(len(ids))
        misread = {
            "d2t read as ids": own_ids - places,
            "token_map read as offsets": own_ids + places,
        }
        for name, found in {**misread, **vocabularies}.items():
            if len(found) != len(ids) or found.min() < 0 or found.max() >= target.vocab_size:
                continue
            if (found != own_ids).any():
                other = replace(own.params, target_ids=jnp.array(found, ids.dtype))
                fault = f"the draft vocabulary is missing or wrong: {name} is better"
                yield own._replace(name=name, params=other, fault=fault)


def _other_recycling(own: Trial, drafter: Any) -> Trial:
    """Return a trial in which an EAGLE-3 head has the opposite value of `recycle_normed`.

    For the next draft, a head reads its own last hidden state. If `recycle_normed` is true, this is
    the state after the head's final norm, else the state before this norm.
    """
    head, normed, plain = drafter.head, "its normed state", "its state before the norm"
    ours, theirs = (normed, plain) if head.recycle_normed else (plain, normed)
    remedy = (
        "norm_output to false"
        if head.recycle_normed
        else 'norm_output to true, and architectures to ["Eagle3LlamaForCausalLM"]'
    )
    other = replace(drafter, head=replace(head, recycle_normed=not head.recycle_normed))
    fault = f"the head recycles {ours}, {theirs} is better; set {remedy} in its config.json"
    return own._replace(name=f"{theirs} recycled", drafter=other, fault=fault)


def _name_faults(
    reference: Tally, tallies: Mapping[str, Tally], trials: Sequence[Trial]
) -> list[str]:
    """Return a list with the fault that the best trial reveals.

    The list is empty if no trial is clearly better than the unchanged drafter. Only the best trial
    counts, because one fault can make several trials look better.
    """
    better = [s for s in trials if reference.is_clearly_below(tallies[s.name], is_paired=True)]
    if not better:
        return []
    best = max(better, key=lambda trial: tallies[trial.name].in_common.mean())
    return [f"{best.fault} ({as_gain(reference, tallies[best.name])})"]


def as_gain(ours: Tally, theirs: Tally) -> str:
    """Describe in words how much better the tally `theirs` is than the tally `ours`."""
    return (
        f"acceptance length {theirs.length:.2f} against {ours.length:.2f}, "
        f"{theirs.in_common.mean():.0%} against {ours.in_common.mean():.0%} overlap"
    )


def _places(text: Text, k: int) -> np.ndarray | None:
    """Return the positions i32[NUM_PLACES] of the tokens after which drafts are made.

    All positions lie in the answer. Return None if the answer is too short.
    """
    last = len(text.tokens) - k - 1
    if last < text.num_prompt:
        return None
    return np.linspace(text.num_prompt, last, NUM_PLACES).astype(np.int32)


@partial(jax.jit, static_argnames=("target", "layers"))
def _read(
    params: Any, tokens: jax.Array, starts: jax.Array, *, target: Model, layers: tuple[int, ...]
) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
    """Run the target on a text.

    Returns:
        The hidden states [T, D] after the last layer.
        A list of the hidden states [T, D] at the input of each of `layers`.
        The target's choices i32[T]: the most likely token after each position.
        The target's distributions f32[N, V] of the token after each of the positions `starts`.
    """
    features, _ = target.extend(params, tokens, CausalRows.of(1, len(tokens)), None, layers)
    logits, auxiliary = target.logits(params, features.hidden), features.auxiliary
    entering = [] if auxiliary is None else jnp.split(auxiliary, len(layers), -1)
    best = logits.argmax(-1).astype(jnp.int32)
    return features.hidden, entering, best, jax.nn.softmax(logits[starts])


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
) -> tuple[jax.Array, jax.Array]:
    """Draft after each position in `starts`, as if each position were a separate request.

    Returns greedy drafts i32[N, k], and the drafter's distributions f32[N, V] for the first draft
    at temperature 1.
    """
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
    requests = init_requests(count, target.vocab_size)  # greedy
    context = DraftContext(
        slots=slots,
        starts=starts,
        is_active=jnp.ones(count, bool),
        page_table=table,
        requests=requests,
        history=History(known, starts + 1),
        has_edits=jnp.array(False),
        kernels="auto",
        row_multiple=1,
        shares_noise=True,
        variant=Variant(),
    )
    drafts = drafter.draft(target, params, state, context, k)[0].tokens
    sampling = replace(requests.sampling, temperature=jnp.ones(count))
    sampled = replace(context, requests=replace(requests, sampling=sampling), shares_noise=False)
    first = drafter.draft(target, params, state, sampled, 1)[0]
    return drafts, draft_probs(first, target.vocab_size)[:, 0]


def _compare(
    drafts: jax.Array,
    tokens: jax.Array,
    best: jax.Array,
    starts: np.ndarray,
    in_common: np.ndarray,
) -> Tally:
    spots = starts[:, None] + np.arange(1, drafts.shape[1] + 1)
    chosen = np.asarray(best)[spots - 1]
    is_accepted = np.logical_and.accumulate(np.asarray(drafts) == chosen, axis=1)
    goes_on = np.logical_and.accumulate(np.asarray(tokens)[spots] == chosen, axis=1)
    is_counted = np.concatenate([np.ones_like(goes_on[:, :1]), goes_on[:, :-1]], axis=1)
    return Tally(is_accepted, is_counted, in_common)
