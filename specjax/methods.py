"""The methods of drafting, their options, and the sources of drafts on the host."""

from typing import Any, NamedTuple

from specjax.checks import check_positive, is_integer, is_number

# A placeholder for a drafter's checkpoint, for reports that need only the drafter's shapes.
OWN_SHAPE = "a head of the model's own shape, without weights"
SOURCES = ("suffix",)  # sources of drafts on the host
# Maximum length of a match of "ngram", in tokens. Each token adds a pass over the whole context to
# every step's program, so that a huge number would never compile. Useful matches have a few tokens.
MAX_LOOKUP = 64
# Length of the longest match of "suffix", in tokens. A match has at least 2 tokens, and each search
# copies and compares this number of tokens.
MIN_DEPTH, MAX_DEPTH = 2, 256
# Maximum number of earlier outputs of "suffix", which have at most a million tokens in total.
MAX_CACHED_REQUESTS = 1_000_000
# Maximum number of drafts per token of a match. A match of 2 tokens then has more drafts than any
# step, so that a larger number would change nothing.
MAX_FACTOR = 1000


class Method(NamedTuple):
    """The properties of a drafting method.

    Attributes:
        needs_model: whether the method needs a separate checkpoint.
        has_weights: whether the drafter has weights, in its own or in the target's checkpoint.
        needs_shape: whether the target's shapes determine the drafter's shapes. Then `specjax info`
            can describe the drafter without its checkpoint.
        options: fields of `SpeculativeConfig` that only this method takes.
        sources: sources of drafts on the host that the method includes.
        drafter: the name under which metrics count the drafts that the method makes on the device;
            None for the method's name.
    """

    needs_model: bool = True
    has_weights: bool = True
    needs_shape: bool = False
    options: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    drafter: str | None = None


SUFFIX_OPTIONS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
METHODS = {
    "eagle": Method(needs_shape=True),
    "eagle3": Method(),
    "mtp": Method(needs_model=False),
    "dflash": Method(),
    "p_eagle": Method(),
    "draft_model": Method(),
    "medusa": Method(),
    "ngram": Method(False, False, options=("prompt_lookup_min", "prompt_lookup_max")),
    "suffix": Method(False, False, options=SUFFIX_OPTIONS, sources=("suffix",), drafter="ngram"),
}
OWN_METHODS = tuple(name for name, method in METHODS.items() if not method.needs_model)


def check_sources(config: Any) -> dict[str, Any]:
    """Check the fields of a `SpeculativeConfig` that choose or configure sources of drafts.

    Return new values by field name: for "ngram", the lengths of matches with defaults filled in;
    for other methods, none.

    Raises:
        ValueError: a field has the wrong type, is out of range, or belongs to another method.
    """
    method, where = METHODS[config.method], "speculative_config"
    sources = config.sources
    free = [name for name in SOURCES if name not in method.sources]
    is_list = isinstance(sources, list | tuple) and len(set(map(str, sources))) == len(sources)
    if not is_list or not all(isinstance(x, str) and x in free for x in sources):
        listed = f"a list of {', '.join(free)}, each once" if free else "left out"
        raise ValueError(
            f"{where}.with={sources!r} must be {listed}, with method={config.method!r}"
        )
    # Every option is a number from here on: an array could not be compared with a default.
    _check_suffix(*(getattr(config, name) for name in SUFFIX_OPTIONS))
    bounds = _lookup_bounds(config.prompt_lookup_min, config.prompt_lookup_max)
    defaults = type(config).__dataclass_fields__
    for name, needs in METHODS.items():
        given = [one for one in needs.options if getattr(config, one) != defaults[one].default]
        if given and name not in (config.method, *sources):
            raise ValueError(f"{where}.{given[0]} goes with method={name!r}, not {config.method!r}")
    if config.model is not None and not method.has_weights:
        raise ValueError(
            f"{where}.model={config.model!r}: method={config.method!r} has no checkpoint; leave it "
            "out"
        )
    is_lookup = "prompt_lookup_min" in method.options
    return dict(zip(method.options, bounds, strict=True)) if is_lookup else {}


def _lookup_bounds(shortest: Any, longest: Any) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest match of method "ngram", in tokens.

    If one of them is None, it is set to the other, as in vLLM. If both are None, they are 2 and 5.
    """
    where = "speculative_config.prompt_lookup"
    named = {f"{where}_min": shortest, f"{where}_max": longest}
    named = {name: value for name, value in named.items() if value is not None}
    check_positive(**named)
    for name, value in named.items():
        if value > MAX_LOOKUP:
            raise ValueError(f"{name}={value} must be at most {MAX_LOOKUP}; 2 to 5 are usual")
    if not named:
        return 2, 5
    low = longest if shortest is None else shortest
    high = shortest if longest is None else longest
    if low > high:
        raise ValueError(
            f"{where}_min={low} exceeds {where}_max={high}; lower the one or raise the other"
        )
    return low, high


def _check_suffix(depth: Any, cached_requests: Any, factor: Any, min_prob: Any) -> None:
    where = "speculative_config.suffix_decoding"
    if not is_integer(depth) or not MIN_DEPTH <= depth <= MAX_DEPTH:
        raise ValueError(
            f"{where}_max_tree_depth={depth!r} must be an integer in {MIN_DEPTH}..{MAX_DEPTH}, "
            "tokens of a match; 24 is usual"
        )
    if not is_integer(cached_requests) or not 0 <= cached_requests <= MAX_CACHED_REQUESTS:
        raise ValueError(
            f"{where}_max_cached_requests={cached_requests!r} must be an integer in "
            f"0..{MAX_CACHED_REQUESTS}, earlier outputs; 10000 is usual"
        )
    if not is_number(factor) or not 0 < factor <= MAX_FACTOR:
        raise ValueError(
            f"{where}_max_spec_factor={factor!r} must be a number above 0 and at most "
            f"{MAX_FACTOR}, drafts per token of the match; 1.0 is usual"
        )
    if not is_number(min_prob) or not 0 <= min_prob <= 1:
        raise ValueError(f"{where}_min_token_prob={min_prob!r} must be in 0..1")
