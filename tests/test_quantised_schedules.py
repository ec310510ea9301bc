"""With quantised weights and pages, drafts, preemption, prefixes and async change no token.

Tokens are compared with plain decoding by the same quantised model.
"""

import pytest
from support.engines import SIZES, K
from support.real_schedules import Found, run_real_schedule
from support.shared_models import NUM_SNAPSHOTS, VOCAB, of_few_words

from specjax.rl import RolloutEngine

pytestmark = pytest.mark.nightly
WIDE = {"hidden_size": 128, "intermediate_size": 128}  # int4 has groups of 128 inputs
MIXED = {"quantization": "fp8", "kv_cache_dtype": "int8"}
CASES = {
    "dense": ("llama", "ngram", WIDE, {"quantization": "int4"}),
    "dense, pages": ("llama", "ngram", WIDE, {"quantization": "int4", "kv_cache_dtype": "int8"}),
    "experts": ("qwen3_moe", "ngram", {}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "hybrid": ("qwen3_5_text", "mtp", {}, MIXED),
    "latents": ("deepseek_v3", "mtp", {}, {"quantization": "fp8"}),
}
# Schedules in which a hybrid, which needs a snapshot for each hit, finds prefixes and is preempted.
SEEDS = {"hybrid": (1, 3, 4)}


@pytest.mark.parametrize("name", CASES)
def test_random_schedules(checkpoints, name):
    kind, method, sizes, given = CASES[name]
    target = checkpoints.target(kind, vocab_size=VOCAB, eos_token_id=VOCAB - 1, **sizes)
    folder = target.folder
    if method == "mtp":
        folder = checkpoints.mtp(target, layout="single").folder
    folder = checkpoints.with_letters(of_few_words(checkpoints, folder))
    config = {"method": method, "num_speculative_tokens": K}
    options = {**given, **SIZES, "num_snapshots": NUM_SNAPSHOTS}
    found = Found()
    with (
        RolloutEngine(folder, speculative_config=config, **options) as ours,
        RolloutEngine(folder, enable_prefix_caching=False, **options) as plain,
    ):
        for seed in SEEDS.get(name, range(3)):
            found += run_real_schedule(ours._llm, plain._llm, seed)
    assert not found.identity.mismatches
    assert all(found.tally[one] > 0 for one in ("preemptions", "prefix hits", "accepted"))
