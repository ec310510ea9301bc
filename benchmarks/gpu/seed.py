"""Figures of one H100 in vLLM's pull request #32374 (dynamic speculative decoding).

They were measured on MT-Bench, for Llama-3.1-8B with an EAGLE-1 head and K up to 5. Milliseconds
per step and acceptance rates are from the profile that the pull request prints. Milliseconds per
token are from its table, for K = 0 and static K = 3.
https://github.com/vllm-project/vllm/pull/32374
"""

# Fraction of steps that accept at least 1, 2, ... drafts.
RATES = (0.6811801775995416, 0.3914351188771126, 0.20352334574620454, 0.1014036092810083,
         0.051417931824692065)  # fmt: skip
MS_PER_STEP = {  # by number of requests and K
    1: {0: 6.520589930005372, 1: 7.367628160864115, 3: 8.84066498838365, 5: 10.32649097032845},
    4: {0: 6.601515458896756, 1: 7.472813129425049, 3: 8.981170016340911, 5: 10.400271974503994},
    16: {0: 6.898819003254175, 1: 7.852344075217843, 3: 9.518282022327185, 5: 11.196403065696359},
    64: {0: 7.774091092869639, 1: 9.656429989263415, 3: 13.497876934707165, 5: 16.831180080771446},
    256: {0: 14.491415582597256, 1: 27.138127014040947, 3: 41.848431108519435,
          5: 57.40421102382243},
}  # fmt: skip
MS_PER_TOKEN = {
    1: {0: 6.30, 3: 3.98},
    4: {0: 6.38, 3: 4.03},
    16: {0: 6.77, 3: 4.45},
    64: {0: 7.94, 3: 6.78},
    128: {0: 10.15, 3: 11.19},
    256: {0: 16.2, 3: 19.96},
}
# Memory bandwidths from datasheets in TB/s, by which times of memory-bound steps are scaled.
PEAK_TBPS = {"H100": 3.35, "H200": 4.8}
BAR = 1.1


def seed_figures(batch: int, k: int) -> dict[str, float]:
    """Return the H100's published figures for a batch size and K, by name. Some may be missing."""
    tables = {"h100_ms_per_step": MS_PER_STEP, "h100_ms_per_token": MS_PER_TOKEN}
    return {name: ms for name, table in tables.items() if (ms := table.get(batch, {}).get(k))}


def peak_gbps(device: str) -> float | None:
    """Return the peak bandwidth in GB/s of the card named `device`; None if it is unknown."""
    return next((1e3 * tbps for name, tbps in PEAK_TBPS.items() if name in device), None)
