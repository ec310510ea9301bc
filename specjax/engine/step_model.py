"""Makes the static model that an engine compiles into its steps, and the initial empty state."""

import jax.numpy as jnp
import numpy as np

from specjax.config import EXACT_WIDTH, EngineConfig
from specjax.device.cache.kind import CacheSizes
from specjax.device.drafters.drafter import Drafter
from specjax.device.inputs import StepModel
from specjax.device.models.model import Model, init_caches, page_windows
from specjax.device.state import EngineState, init_state
from specjax.device.verification import Verification
from specjax.host.windows import window_pages

# Up to this number of rows, a drafter takes hardly longer than for one row, because reading its
# weights takes most of the time.
MAX_DEFERRED_ROWS = {"gpu": 64, "cpu": 16}
# On a GPU, even for a large batch, observing several rounds together saves time: the drafter's
# weights are read less often, and fewer kernels are launched.
MIN_DEFERRED_ROUNDS = {"gpu": 4}


def step_model(
    config: EngineConfig, target: Model, drafter: Drafter, verification: Verification, platform: str
) -> StepModel:
    """Return the `StepModel` that an engine compiles into its steps on a platform."""
    return StepModel(
        target,
        drafter,
        verification,
        config.kernels,
        # Reading the weights takes longest, so extra rows are free. Matrix units take multiples of
        # 8 rows.
        row_multiple=8 if platform == "gpu" else 1,
        width_multiple=EXACT_WIDTH if config.exact else 1,
        logprobs_mode=config.logprobs_mode,
        windows=page_windows(target, config),
        max_deferred_rows=MAX_DEFERRED_ROWS.get(platform, 0),
        min_deferred_rounds=MIN_DEFERRED_ROUNDS.get(platform, 0),
        vocabulary=target.vocabulary,
    )


def sizes_of_windows(
    config: EngineConfig, model: StepModel, max_drafts: int
) -> tuple[tuple[int, int], ...]:
    """Return a pair (window, number of pages) for each sliding window that has separate pages."""
    return tuple((one, window_pages(config, one, max_drafts)) for one in model.windows)


def empty_state(config: EngineConfig, model: StepModel, max_drafts: int) -> EngineState:
    """Return the state of an engine without requests, for steps of up to `max_drafts` drafts."""
    dtype, target = np.dtype(config.dtype), model.target
    rows = model.width(max_drafts)
    kinds, num_snapshots = target.cache_kinds, config.num_snapshots
    pages = sizes_of_windows(config, model, max_drafts)
    sizes = CacheSizes(config.max_num_seqs, config.num_pages, config.page_size, rows, num_snapshots)
    of_target = sizes._replace(window_pages=pages, page_format=config.page_format)
    deferred = None
    if model.max_deferred(1):
        num_features = (1 + len(model.drafter.aux_layers)) * target.hidden_size
        num_rows = max(batch * model.max_deferred(batch) for batch in (1, *config.decode_batches))
        deferred = jnp.zeros((num_rows, num_features), dtype)
    return init_state(
        config.max_num_seqs,
        config.max_model_len,
        target.vocab_size,
        init_caches(target, of_target, dtype),
        tuple(kind.init_snapshots(num_snapshots, dtype) for kind in kinds),
        model.drafter.init_state(sizes._replace(page_format=config.draft_page_format), dtype),
        deferred,
    )
