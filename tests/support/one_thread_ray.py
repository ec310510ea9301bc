"""A replacement of Ray that runs in one thread, with fake engines that fail on request."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace

import numpy as np

from specjax.rl.rollouts import Rollout, RolloutBatch
from specjax.rl.weights import WeightUpdate
from specjax.sampling_params import SamplingParams


class Reference:
    """The result of an actor's method, or the error that it raised."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


class OneThread:
    """The parts of Ray that workers use. A remote method runs as soon as it is called."""

    exceptions = SimpleNamespace(
        **{
            name: type(name, (Exception,), {})
            for name in ("RayActorError", "WorkerCrashedError", "ObjectLostError", "RayTaskError")
        }
    )

    def __init__(self):
        self.cpus = 4.0
        self.kills_late = False  # as in Ray, a killed actor may still answer one call
        self.actors = []  # all that were ever started

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}, {"Alive": False, "Resources": {}}]

    def remote(self, **_):
        def options(cls):
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(start, cls)))

        def start(cls, *args):
            self.actors.append(Actor(cls(*resolved(args))))
            return self.actors[-1]

        return options

    def put(self, value):
        return Reference(value)

    def get(self, reference):
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(self, references, num_returns):
        return references[:num_returns], references[num_returns:]

    def kill(self, actor):
        actor.calls_left = int(self.kills_late)


def resolved(args):
    return [one.value if isinstance(one, Reference) else one for one in args]


class Actor:
    def __init__(self, instance):
        self.instance, self.calls_left = instance, inf

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            kwargs = dict(zip(kwargs, resolved(kwargs.values()), strict=True))
            if self.calls_left <= 0:
                return Reference(error=OneThread.exceptions.RayActorError("it was killed"))
            self.calls_left -= 1
            try:
                return Reference(getattr(self.instance, name)(*resolved(args), **kwargs))
            except Death:
                self.calls_left = 0
                return Reference(error=OneThread.exceptions.RayActorError("it died"))
            except Exception as error:
                failed = OneThread.exceptions.RayTaskError()
                failed.cause = error
                return Reference(error=failed)

        method = SimpleNamespace(remote=remote)
        method.options = lambda concurrency_group: method
        return method


class Death(BaseException):
    """Raised by an actor's method to end the actor's process."""


class FailingEngine:
    """A fake engine that only counts versions, and raises the errors in `plan`."""

    plan = defaultdict(list)  # for each method what its next calls raise, or None

    def __init__(self, model, speculative_config=None):
        self.version = self.drafter_version = self.sleep_level = 0
        self.weights = self.drafter = None
        self.aborted = []
        self._fail("build")

    def _fail(self, method):
        if self.plan[method] and (error := self.plan[method].pop(0)):
            raise error

    def update_weights(self, weights, version, *, pause="keep", drafter=None):
        self._fail("update_weights")
        if "mtp.fc" in weights and drafter is None:
            drafter = weights
        if drafter is not None:
            self.update_drafter(drafter)
        self.weights, self.version = weights["w"].item(), version
        return WeightUpdate(version, 1, 4, 0.0)

    def update_drafter(self, weights, *, pause="keep"):
        self._fail("update_drafter")
        self.drafter = weights["mtp.fc"].item()
        self.drafter_version += 1
        return WeightUpdate(self.drafter_version, 1, 4, 0.0)

    def facts(self):
        return self.version, self.drafter_version, self.weights, self.drafter, self.sleep_level

    def metrics(self):
        return 0

    def check(self, *_, **__):
        pass

    check_score = check

    def generate(self, prompts, sampling_params=None, *, label):
        self._fail("generate")
        assert not self.sleep_level
        none = np.zeros(0, np.int32)
        one = Rollout(none, none, none, None, (), "length", None, SamplingParams(), 0, 0, 0)
        return RolloutBatch(replace(one, prompt_index=i) for i in range(len(prompts)))

    def score(self, samples, sampling_params, features):
        self._fail("score")
        return [output for _, output in samples]

    def abort(self, label):
        self.aborted.append(label)

    def sleep(self, level):
        self._fail("sleep")
        self.sleep_level = level

    def wake_up(self):
        self._fail("wake_up")
        self.sleep_level = 0
