"""Reads the default sampling parameters of a checkpoint from its generation_config.json."""

from pathlib import Path

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.sampling_params import SamplingParams

FILE = "generation_config.json"
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_default_params(folder: Path) -> SamplingParams:
    """Return the checkpoint's sampling parameters.

    Parameters that the file does not set have the defaults of `SamplingParams`. As in vLLM,
    `do_sample` is ignored: decoding is greedy only if the temperature is 0.

    Raises:
        CheckpointError: a value is not valid.
    """
    if not (folder / FILE).exists():
        return SamplingParams()
    found = read_json(folder, FILE)
    named = {
        ours: found[theirs] for theirs, ours in FIELDS.items() if found.get(theirs) is not None
    }
    try:
        return SamplingParams(**named)
    except ValueError as error:
        raise CheckpointError(f"{folder / FILE}: {error}; mend the file") from error
