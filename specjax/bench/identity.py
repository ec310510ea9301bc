"""Compares the tokens of two runs, and tells rounding differences from real mismatches.

In float32, the logits of two programs with different shapes differ by up to 4e-5. If the two best
candidates for a token have very close scores, rounding can swap them. Two runs can then diverge at
that token, and their later tokens cannot be compared. Such a difference counts as a near-tie. Any
other difference is a mismatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.result import NEAR_TIE
from specjax.device.edits import History, Processors, apply_processors
from specjax.device.inputs import AdmitInputs
from specjax.device.layout import Layout
from specjax.device.models.model import Model
from specjax.device.noise import Stream, gumbel_noise
from specjax.device.requests import Requests
from specjax.device.sampling import process, scale
from specjax.device.vocabulary import WHOLE
from specjax.engine.admissions import pack_admissions
from specjax.engine.engine import Engine
from specjax.host.request import Request
from specjax.host.residency import Residency
from specjax.host.sequence import Sequence as Sample
from specjax.train.context import CausalRows


@dataclass
class Identity:
    """The result of comparing the outputs of two runs.

    For each output that differs, either `near_ties` or `mismatches` has a sentence.
    """

    num_outputs: int = 0
    num_tokens: int = 0  # tokens compared, up to each output's first difference
    near_ties: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def __add__(self, other: "Identity") -> "Identity":
        return Identity(
            self.num_outputs + other.num_outputs,
            self.num_tokens + other.num_tokens,
            self.near_ties + other.near_ties,
            self.mismatches + other.mismatches,
        )


@dataclass(frozen=True)
class Scorer:
    """Scores every candidate for a request's next token. Sampling picks the highest score.

    The scores come from a forward pass over the prompt and the output so far.
    """

    engine: Engine

    def two_best(self, request: Request, index: int, output: Sequence[int]) -> tuple[Any, float]:
        """Return the ids of the two best next tokens after `output`, and their scores' difference.

        The best token comes first. At temperature 0, a token's score is its logit. At other
        temperatures, the score is the logit divided by the temperature, plus sampling noise, which
        depends on the sample's `index`. Grammars are ignored.
        """
        layout = self.engine.layout
        tokens = np.zeros(layout.max_model_len, np.int32)
        known = [*request.prompt_token_ids, *output]
        tokens[: len(known)] = known
        functions = tuple(request.params.logits_processors or ())
        with jax.default_matmul_precision("highest"):
            ids, gap = _two_best(
                self.engine.params.target,
                jnp.array(tokens),
                jnp.array([len(known)], jnp.int32),
                _requests(request, index, layout),
                model=self.engine.target,
                processors=((request.processor, functions),),
            )
        return ids.tolist(), float(gap)


def compare(
    engine: Engine,
    requests: Iterable[tuple[Request, int]],
    expected: Iterable[Sequence[int]],
    outputs: Iterable[Sequence[int]],
) -> Identity:
    """Compare `outputs` with `expected`.

    `requests` holds a pair of a request and a sample index for each output.
    """
    found, scorer = Identity(), Scorer(engine)
    for (request, index), before, after in zip(requests, expected, outputs, strict=True):
        found.num_outputs += 1
        pairs = enumerate(zip(before, after, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
        found.num_tokens += place
        if len(before) == len(after) == place:
            continue
        where = f"request {request.request_id}.{index} at output token {place}"
        if place == min(len(before), len(after)):
            found.mismatches.append(f"{where}: lengths {len(before)} and {len(after)}")
            continue
        pair = before[place], after[place]
        best, gap = scorer.two_best(request, index, before[:place])
        is_tie = set(pair) == set(best) and gap < NEAR_TIE
        kind = found.near_ties if is_tie else found.mismatches
        kind.append(f"{where}: {pair[0]} and {pair[1]}; the best are {best}, {gap:.1e} apart")
    return found


def _requests(request: Request, index: int, layout: Layout) -> Requests:
    sample = Sample.of(request, index, 0)
    sample.residency = Residency(slot=0, num_to_prefill=len(request.prompt_token_ids))
    packed = pack_admissions([sample], 1, layout)
    return jax.tree.map(jnp.asarray, layout.packing(AdmitInputs).views(packed).requests)


@partial(jax.jit, static_argnames=("model", "processors"))
def _two_best(
    params: Any,
    tokens: jax.Array,
    length: jax.Array,
    requests: Requests,
    *,
    model: Model,
    processors: Processors,
) -> tuple[jax.Array, jax.Array]:
    rows = CausalRows.of(1, tokens.shape[0])
    features, _ = model.extend(params, tokens, rows, None)
    logits = model.logits(params, features.hidden[length - 1])
    history = History(tokens[None], length)
    logits = apply_processors(logits[None], requests, history, processors, WHOLE)
    logits = process(logits, requests, history)[0]
    sampling = requests.sampling
    noise = gumbel_noise(sampling.seeds, Stream.TARGET, (length,), logits.shape[1])
    scores = scale(logits, sampling) + jnp.where(sampling.temperature[:, None] > 0, noise, 0.0)
    values, ids = jax.lax.top_k(scores[0], 2)
    return ids, values[0] - values[1]
