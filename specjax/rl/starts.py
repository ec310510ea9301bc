"""Validates the arguments of a rollout engine's calls, and makes requests from them.

The requests are not queued here.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specjax.host.request import Request
from specjax.rl.rollouts import Rollout
from specjax.sampling_params import SamplingParams
from specjax.text.prompts import RequestMaker, as_prompt_list, one_each


class Start(NamedTuple):
    """A request that generates the samples of a prompt, or resumes a rollout."""

    request: Request
    params: SamplingParams  # the user's parameters
    prompt_index: int
    place: int  # index among the prompts or rollouts of the call
    before: Rollout | None = None  # the aborted rollout that the request resumes


class StartMaker:
    """Makes requests, and numbers their prompts consecutively over all calls.

    A prompt's number determines its default seed, which is used if its parameters have no seed.
    """

    def __init__(self, request_maker: RequestMaker):
        self._request_maker = request_maker
        self._ids = itertools.count()
        self._lock = threading.Lock()  # numbers must be unique across threads
        self.num_prompts = 0

    def make(self, prompts: Any, sampling_params: Any, *, counts: bool = True) -> list[Start]:
        """Return a `Start` for each prompt, or for each rollout to resume.

        Args:
            counts: whether to count the prompts; False to only check them. Counted prompts shift
                the default seeds of later prompts. Rollouts are never counted.

        Raises:
            ValueError: a prompt, rollout or parameter is not supported; prompts and rollouts are
                mixed; `sampling_params` are given for rollouts; or there are more or fewer
                `sampling_params` than prompts.
        """
        listed: list[Any] = [prompts] if isinstance(prompts, Rollout) else as_prompt_list(prompts)
        are_rollouts = [isinstance(one, Rollout) for one in listed]
        with self._lock:
            if not any(are_rollouts):
                starts = self._make_new(listed, sampling_params)
                self.num_prompts += len(starts) if counts else 0
                return starts
            if not all(are_rollouts):
                raise ValueError("prompts and rollouts cannot be mixed; make two calls")
            if sampling_params is not None:
                raise ValueError("sampling_params: rollouts continue with their own; leave it out")
            return [self._make_resumed(one, i) for i, one in enumerate(listed)]

    def make_scored(
        self, sample: Any, params: SamplingParams | None, where: str, *, exports_features: bool
    ) -> Request | None:
        """Return a request that scores `sample`: a rollout, or a pair (prompt, completion).

        Return None if `sample` has no tokens to score. Error messages call the sample `where`.

        Raises:
            ValueError: `sample` is not a rollout or a pair, or some of its tokens cannot be scored.
        """
        if isinstance(sample, Rollout):
            params = sample.params if params is None else params
            sample = sample.prompt_token_ids, sample.token_ids
        if not isinstance(sample, Sequence) or isinstance(sample, str) or len(sample) != 2:
            raise ValueError(
                f"{where} must be a Rollout, or token ids of a prompt and a completion"
            )
        prompt, output = sample
        if hasattr(output, "__len__") and not len(output):
            return None
        params = _reporting(SamplingParams() if params is None else params, where)
        with self._lock:
            return self._request_maker.make_scored(
                prompt,
                output,
                params,
                ("score", next(self._ids)),
                where,
                exports_features=exports_features,
            )

    def _make_new(self, prompts: list[Any], sampling_params: Any) -> list[Start]:
        given = SamplingParams() if sampling_params is None else sampling_params
        listed = one_each("sampling_params", given, len(prompts))
        starts = []
        for i, (prompt, params) in enumerate(zip(prompts, listed, strict=True)):
            request = self._request_maker.make(
                prompt,
                _reporting(params, f"prompt {i}"),
                self.num_prompts + i,
                f"prompt {i}",
                request_id=("rollout", next(self._ids)),
            )
            starts.append(Start(request, params.clone(), i, i))
        return starts

    def _make_resumed(self, rollout: Rollout, place: int) -> Start:
        where = f"rollout {place}"
        if not rollout.is_partial:
            raise ValueError(
                f"{where} has ended (finish_reason={rollout.finish_reason!r}); only aborted "
                "rollouts can be continued"
            )
        params = replace(rollout.params, n=1, seed=rollout.seed)
        request = self._request_maker.make(
            rollout.prompt_token_ids.tolist(),
            _reporting(params, where),
            0,
            where,
            request_id=("rollout", next(self._ids)),
            output=rollout.token_ids.tolist(),
        )
        return Start(request, rollout.params, rollout.prompt_index, place, rollout)


def _reporting(params: Any, where: str) -> SamplingParams:
    """Return a copy of the parameters that requests the log-probability of every token."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{where}: sampling_params={params!r} must be a SamplingParams")
    for name in "logprobs", "prompt_logprobs":
        if getattr(params, name) is not None:
            raise ValueError(
                f"{where}: {name}={getattr(params, name)} is not for rollouts, which always have "
                "the log-probability of every token; leave it out (for given tokens, call score)"
            )
    return replace(params, logprobs=0)
