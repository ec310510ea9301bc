"""The ways to choose K, by name: "static:K", "table", "profile" and "adaptive"."""

from collections.abc import Sequence

from specjax.host.speculation import POLICIES
from specjax.host.speculation.acceptance import Acceptance
from specjax.host.speculation.policy import GoodputPolicy, Policy, StaticPolicy, TablePolicy
from specjax.host.speculation.profile import Profile
from specjax.host.speculation.step_cost import StepCost

# Number of rounds with drafts before learned rates, which rest on few drafts at first, replace
# a profile's rates.
WARM_UP_ROUNDS = 10


def spread_ks(max_k: int) -> tuple[int, ...]:
    """Return the Ks to choose from: every K up to 5, then odd Ks, and `max_k`.

    A program is compiled for every K, and neighbouring large Ks differ little.
    """
    return tuple(k for k in range(max_k + 1) if k <= 5 or k % 2 or k == max_k)


def profile_policy(
    profile: Profile, batches: Sequence[int], max_k: int | None = None, max_slowdown: float = 0.0
) -> GoodputPolicy:
    """Return a policy that uses the rates and times of a profile.

    Rounds are padded to the batch sizes `batches`. If `profile.is_online` is True, the policy
    learns rates while serving, with the profile's rates as the prior. K is at most `max_k`, by
    default the profile's maximum.
    """
    max_k = profile.max_drafts if max_k is None else max_k
    return GoodputPolicy(
        spread_ks(max_k),
        profile.cost(spread_ks(max_k), batches),
        Acceptance(max_k, profile.rates),
        learns_cost=False,
        learns_acceptance=profile.is_online,
        warm_up_rounds=WARM_UP_ROUNDS,
        max_slowdown=max_slowdown,
    )


def adaptive_policy(
    max_k: int, cost: StepCost | None = None, max_slowdown: float = 0.0
) -> GoodputPolicy:
    """Return a policy that learns rates and times while serving.

    The policy starts with the times `cost`. If `cost` is None, the engine measures the times when
    it starts. For `max_slowdown`, see `fairness`.
    """
    return GoodputPolicy(spread_ks(max_k), cost, Acceptance(max_k), max_slowdown=max_slowdown)


def resumed_policy(
    profile: Profile, batches: Sequence[int], max_k: int | None = None, max_slowdown: float = 0.0
) -> GoodputPolicy:
    """Return an adaptive policy whose first times and rates come from a profile.

    So the engine need not measure times when it starts. For `batches` and `max_k`, see
    `profile_policy`.
    """
    max_k = profile.max_drafts if max_k is None else max_k
    return GoodputPolicy(
        spread_ks(max_k),
        profile.cost(spread_ks(max_k), batches),
        Acceptance(max_k, profile.rates),
        warm_up_rounds=WARM_UP_ROUNDS,
        max_slowdown=max_slowdown,
    )


def make_policy(name: str, profile: Profile, batches: Sequence[int]) -> Policy:
    """Return the policy called `name`: "static:K", "table", "profile" or "adaptive".

    The policy never chooses a K above the profile's maximum.

    Raises:
        ValueError: the name is unknown, or the K in it exceeds the profile's maximum.
    """
    kind, _, k = name.partition(":")
    if kind == "static" and k.isdecimal():
        if int(k) > profile.max_drafts:
            raise ValueError(
                f"{name} exceeds the profile's max_num_speculative_tokens={profile.max_drafts}; "
                "lower K, or profile more drafts"
            )
        return StaticPolicy(int(k))
    if name == "table":
        return TablePolicy(profile.as_table())
    if name == "profile":
        return profile_policy(profile, batches)
    if name == "adaptive":
        return adaptive_policy(profile.max_drafts)
    raise ValueError(f"{name} is not one of {', '.join(POLICIES)}")
