"""Handles vLLM 0.33's names: accepts values that match the behaviour here, and refuses others."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from specjax.checks import did_you_mean, warn

PAGE = "docs/coming_from_vllm.md"
CONTENT_FORMATS = ("auto", "string", "openai")  # values of chat_template_content_format
_GREEDY_NAMES = "beam search is not supported; sample several outputs, SamplingParams(n=...)"
_NO_POOLING = "models here only generate"
_ONE_PROCESS = "an engine runs in this process"

# Missing methods and attributes of vLLM's `LLM` and `AsyncLLM`, and alternatives to them.
METHODS: Mapping[str, str] = {
    "beam_search": _GREEDY_NAMES,
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), _NO_POOLING),
    **dict.fromkeys(("apply_model", "collective_rpc", "get_world_size"), _ONE_PROCESS),
    "llm_engine": "the engine is `engine`, and has other methods",
    "set_tokenizer": "the tokenizer is the checkpoint's",
    "reset_mm_cache": "models here read only text",
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), "there are no adapters"),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update"),
        "weights are updated by specjax.rl.RolloutEngine.update_weights",
    ),
    "model_config": "the model is `target`, and sizes are in `engine.config`",
    "vllm_config": "sizes are in `engine.config`",
}


class Taken(NamedTuple):
    """A field of vLLM that specjax lacks, and the values that are accepted without effect."""

    values: tuple[Any, ...] | None  # accepted values; None for any value
    instead: str = ""  # the alternative here


_SAME = Taken(None)
SAMPLING: Mapping[str, Taken] = {
    "best_of": Taken((None, 1), "all n samples are returned"),
    "use_beam_search": Taken((False, None), _GREEDY_NAMES),
    "length_penalty": Taken((1.0, None), _GREEDY_NAMES),
    "early_stopping": Taken((False, None), _GREEDY_NAMES),
    "guided_decoding": Taken((None,), "its name is structured_outputs"),
    "flat_logprobs": Taken((False,), "logprobs are mappings by token id"),
    "logprob_token_ids": Taken((None,), "logprobs=n reports the likeliest tokens"),
    "prompt_logprob_token_ids": Taken((None,), "prompt_logprobs=n reports the likeliest tokens"),
    "prompt_logprob_start": Taken((None, 0), "prompt_logprobs cover the whole prompt"),
    "stream_interval": Taken((None, 1), "streams yield added tokens at every step"),
    "skip_clone": _SAME,
    "extra_args": Taken((None, {}), "there are no plugins to read it"),
    "skip_reading_prefix_cache": Taken((None, False), "see LLM(enable_prefix_caching=False)"),
    "thinking_token_budget": Taken((None, -1), "max_tokens limits all tokens"),
    "repetition_detection": Taken((None,), "stop and max_tokens end outputs"),
    "routed_experts_prompt_start": Taken((0,), "routes of experts are not returned"),
    "trace_decode_token_ids": Taken((None,), "prompt_logprobs score given tokens"),
}
STRUCTURED: Mapping[str, Taken] = {
    "disable_any_whitespace": Taken((False,), "a grammar can exclude whitespace"),
    "disable_additional_properties": Taken((False,), 'say "additionalProperties": false'),
    "whitespace_pattern": Taken((None,), "a grammar can define whitespace"),
}
_DRAFT_SIZES = "draft_tensor_parallel_size", "tensor_parallel_size"
SPECULATION: Mapping[str, Taken] = {
    **dict.fromkeys(
        _DRAFT_SIZES,
        Taken((None, 1), "a drafter is divided over devices like its target"),
    ),
    **dict.fromkeys(
        (
            *("enforce_eager", "moe_backend", "attention_backend", "use_heterogeneous_vocab"),
            *("use_local_argmax_reduction", "disable_padded_drafter_batch"),
        ),
        _SAME,
    ),
    "max_model_len": Taken((None,), "a drafter has the length of its target"),
    **dict.fromkeys(
        ("revision", "code_revision"), Taken((None,), "download the revision, and give its folder")
    ),
    "draft_load_config": Taken((None,), "checkpoints are safetensors files"),
    "index_share_for_mtp_iteration": Taken((None,), "the checkpoint's config determines it"),
    "disable_eagle_block_drop": Taken((False,), "prefixes are kept by whole pages"),
    "parallel_drafting": Taken((False, None), "name the method 'p_eagle'"),
    "enable_adaptive_verification": Taken((False,), "adaptive=True chooses K while serving"),
    "dspark_draft_topk": Taken((None,), "drafts are drawn from the whole draft vocabulary"),
    "disable_by_batch_size": Taken((None,), "num_speculative_tokens_per_batch_size sets K by size"),
}

# vLLM's names of methods and of verification, and our names for them.
_DRAFTING = {"dspark": "dflash", "ngram_gpu": "ngram"}
_VERIFICATION = {"standard": "rejection", "block": "block", "synthetic": "synthetic"}

Class = TypeVar("Class", bound=type)


def take_keys(
    given: Mapping[Any, Any], table: Mapping[str, Taken], where: str, known: Iterable[str]
) -> dict[str, Any]:
    """Return `given` without the keys in `table`, which are vLLM's. Other keys must be in `known`.

    Raises:
        ValueError: a key of `table` has a value that would change the behaviour (the message names
            an alternative), or a key is in neither `table` nor `known`.
    """
    for name in given.keys() & table.keys():
        _check(name, given[name], table[name], f"{where}.{name}")
    kept = {name: value for name, value in given.items() if name not in table}
    known = list(known)
    if unknown := sorted(map(str, kept.keys() - set(known))):
        hint = did_you_mean(unknown[0], known)
        raise ValueError(
            f"{where} has unknown keys {unknown}; known keys are {sorted(known)}{hint}"
        )
    return kept


def without_draft_size(config: Any, tensor_parallel_size: int) -> Any:
    """Return a `speculative_config` without vLLM's option for the drafter's number of devices.

    A drafter always has the same devices as its target. The option is kept if its value differs
    from `tensor_parallel_size`, so that it is refused later.
    """
    if not isinstance(config, Mapping):
        return config
    known = dict.fromkeys(_DRAFT_SIZES, tensor_parallel_size).items()
    return {name: value for name, value in config.items() if (name, value) not in known}


def take_speculation(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return a `speculative_config` with vLLM's names translated to our names.

    Raises:
        ValueError: see `take_keys`.
    """
    config = dict(given)
    method = config.get("method")
    if isinstance(method, str):
        renamed = "mtp" if method.endswith("_mtp") else _DRAFTING.get(method, method)
        is_parallel = method == "eagle3" and config.get("parallel_drafting") is True
        config["method"] = "p_eagle" if is_parallel else renamed
        if config["method"] == "p_eagle":  # which drafts in parallel
            config.pop("parallel_drafting", None)
    if (name := config.get("rejection_sample_method")) in _VERIFICATION:
        del config["rejection_sample_method"]
        config.setdefault("verification", _VERIFICATION[name])
    return take_keys(config, SPECULATION, "speculative_config", known)


def takes(table: Mapping[str, Taken]) -> Callable[[Class], Class]:
    """Return a class decorator with which a dataclass's constructor also accepts vLLM's names.

    `table` lists these names. The constructor raises ValueError for a value that would change the
    behaviour, and TypeError for a name that is neither a field nor in `table`.
    """

    def decorate(cls: Class) -> Class:
        init: Callable[..., None] = cls.__init__

        @wraps(init)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            known = cls.__dataclass_fields__
            if not given.keys() <= known.keys():
                for name in given.keys() - known.keys():
                    if name not in table:
                        hint = did_you_mean(name, known)
                        raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
                    _check(name, given[name], table[name], name)
                given = {name: value for name, value in given.items() if name in known}
            init(self, *args, **given)

        cls.__init__ = __init__
        return cls

    return decorate


def _check(name: str, value: Any, taken: Taken, where: str) -> None:
    """Check the value of a name that only vLLM has.

    If any value is accepted, warn that the name has no effect. Otherwise, refuse a value that is
    not among the accepted values.
    """
    if taken.values is None:
        warn(f"{name}={value!r} is an option of vLLM, and has no effect here")
    # 0 == False, so compare types as well.
    elif not any(value == one and type(value) is type(one) for one in taken.values):
        raise ValueError(f"{where}={value!r} is not supported: {taken.instead}; see {PAGE}")
