"""Seeds of 64 bits: which are valid, how they are folded, and where they may be given."""

import numpy as np
import pytest
from support.engines import make_llm
from support.shared_models import llama

from specjax import SamplingParams
from specjax.text.seeds import derived_seed, folded_seed

LARGE = [2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1, -2, -3, -(2**32)]


def test_small_seeds_are_their_own_and_others_have_32_bits():
    """Seeds below 2**32 do not change. Derived seeds are NumPy's for the two numbers."""
    for seed in 0, 1, 2**31, 2**32 - 1:
        assert folded_seed(seed) == seed
        expected = np.random.SeedSequence([seed, 7]).generate_state(1)[0]
        assert derived_seed(seed, 7) == expected
    for seed in LARGE:
        words = [seed % 2**32, seed % 2**64 // 2**32, 1]
        assert folded_seed(seed) == np.random.SeedSequence(words).generate_state(1)[0]
    folded = [folded_seed(seed) for seed in LARGE]
    assert all(0 <= seed < 2**32 for seed in folded)
    assert len({*folded, *(derived_seed(2**32 - 1, i) for i in range(9)), 0, 1}) == len(LARGE) + 11
    for seed in -1, -2, -(2**63):  # the complement of two
        assert folded_seed(seed) == folded_seed(seed + 2**64)


@pytest.mark.usefixtures("simulated_device")
@pytest.mark.parametrize("seed", [2**63 - 1, -5])
def test_requests_and_engines_take_them(checkpoints, seed):
    with make_llm(llama(checkpoints).folder, seed=seed) as llm:
        own = llm.make_request([1], SamplingParams(seed=seed, n=2))
        assert own.seeds == (folded_seed(seed), derived_seed(folded_seed(seed), 1))
        assert own.params.seed == seed
        without = [llm.make_request([1], SamplingParams(seed=one)) for one in (None, -1)]
        assert [one.seeds for one in without] == [(derived_seed(seed, i),) for i in (1, 2)]
        assert len(llm.generate([[1]], SamplingParams(seed=seed), use_tqdm=False)) == 1
