"""The cases to measure on the card, cheapest and most informative first.

A case is a generator function in a module of this folder. It runs in a separate process, and yields
results, which are written immediately. `plan` selects cases that fit into a number of minutes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}  # so that CUPTI sees every kernel
# No autotuning, which compiles each product dozens of times: for cases that time nothing.
UNTUNED = {"XLA_FLAGS": f"{NO_GRAPHS['XLA_FLAGS']} --xla_gpu_autotune_level=0"}
# Makes XLA log when it records a graph again.
LOGGED_GRAPHS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3"}
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves memory to another framework


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case, which runs in a separate process.

    Attributes:
        seconds: the time after which the process is killed.
        least: the time that the first results need. With less time, the case is not started.
    """

    name: str
    function: str  # "module:function", called with a `timing.Setting` and the arguments
    about: str
    seconds: float
    least: float = 20.0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = True  # whether the smoke test runs it; one case of each kind is enough

    @property
    def group(self) -> str:
        """The first part of the name, by which `--only` selects all cases of a group."""
        return self.name.partition("/")[0]


def _correct(dtype: str) -> Case:
    # References take half of the time to compile, with one thread per core.
    return Case(
        name=f"correct/{dtype}",
        function="correct:check_kernels",
        about=f"every kernel in {dtype} against its reference in float32, and against itself",
        seconds=90,
        least=45,
        arguments={"dtype": dtype},
        environment=UNTUNED,
        on_cpu=dtype == "float32",
    )


def _tokens(model: str, dtype: str) -> Case:
    return Case(
        name=f"tokens/{model}-{dtype}",
        function="tokens:check_tokens",
        about=f"{model} in {dtype} with each of its drafters, against tokens of a CPU",
        seconds=150,
        least=40,
        arguments={"dtype": dtype, "models": (model,)},
        on_cpu=(model, dtype) == ("demo-llama", "float32"),  # others only load other files
    )


def _watch(name: str, seconds: float, about: str, **others: Any) -> Case:
    return Case(
        name=f"watch/{name}",
        function=f"watch:measure_{name}",
        about=about,
        seconds=seconds,
        least=45,
        **others,
    )


def _kernels(name: str, seconds: float, about: str, *, on_cpu: bool = True) -> Case:
    return Case(
        name=f"kernels/{name}",
        function=f"kernels:time_{name}",
        about=about,
        seconds=seconds,
        environment=NO_GRAPHS,
        on_cpu=on_cpu,
    )


def _grid(batch: int, seconds: float) -> Case:
    return Case(
        name=f"grid/{batch}",
        function="grid:measure_grid",
        about=f"Llama-3.1-8B + EAGLE-1, {batch} requests, K 0, 3, 1, 5, synthetic acceptance",
        seconds=seconds,
        least=40,
        arguments={"batch": batch},
        on_cpu=batch == 1,
    )


def _model(name: str, seconds: float) -> Case:
    return Case(
        name=f"models/{name}",
        function="grid:measure_models",
        about=f"{name} + MTP, K 0 and 3, 1, 16 and 64 requests",
        seconds=seconds,
        least=50,
        arguments={"names": (name,), "batches": (1, 64, 16)},
        on_cpu=name == "Qwen3.5-4B",
    )


def _profile(name: str) -> Case:
    return Case(
        name=f"profile/{name}",
        function="inside:profile_steps",
        about=f"{name}, each kernel of a step of 1 and 64 requests, K 0 and 3",
        seconds=150,
        least=30,
        arguments={"name": name},
        environment=NO_GRAPHS,
        on_cpu=name == "Qwen3.5-4B",
    )


def _command_buffers(name: str, environment: Mapping[str, str]) -> Case:
    return Case(
        name=f"graphs/{name}",
        function="host:measure_step",
        about=f"a Llama-3.1-8B step, K 0 and 3, 1 request, command buffers {name}",
        seconds=50,
        arguments={"label": name},
        environment=environment,
        on_cpu=False,  # `Step` also runs in host/1
    )


CASES = (
    Case(
        name="card",
        function="card:measure_card",
        about="copy and read bandwidth, bf16 products: what all else is measured against",
        seconds=40,
        least=10,
    ),
    Case(
        name="smoke",
        function="smoke:check_smoke",
        about="every kernel once, tiny and at a real shape, against NumPy's results in float64",
        seconds=90,
        least=30,
    ),
    Case(
        name="memory",
        function="memory:check_memory",
        about="the tiny ones of smoke under compute-sanitizer, if it is there",
        seconds=120,
        least=60,
    ),
    _tokens("demo-llama", "float32"),
    _correct("bfloat16"),
    _grid(1, 110),
    _grid(64, 110),
    _kernels("attention", 80, "paged attention by batch, rows and context"),
    _kernels("delta_rule", 60, "the gated delta rule, and K + 1 snapshots instead"),
    _grid(256, 80),
    _correct("float32"),
    _tokens("demo-qwen3.5", "float32"),
    _kernels("others", 60, "rope_write, add_rms_norm, grouped products, truncation"),
    _grid(16, 60),
    _model("Qwen3.5-4B", 100),
    _model("Qwen3.5-27B", 130),
    *map(_profile, ("Llama-3.1-8B", "Qwen3.5-27B", "Llama-3.2-1B", "Qwen3.5-4B")),
    _kernels("delta_rule_tiles", 400, "other tiles of the gated delta rule's step"),
    *(
        Case(
            name=f"host/{batch}",
            function="host:measure_host",
            about=f"how busy steps keep the device at {batch} requests, async and sync",
            seconds=90,
            least=30,
            arguments={"batch": batch},
            on_cpu=batch == 1,
        )
        for batch in (1, 64)
    ),
    _command_buffers("off", NO_GRAPHS),
    _command_buffers("on", {}),
    Case(
        name="graphs/tokens",
        function="graphs:check_graphs",
        about="tokens of 200 steps with command buffers and without, K and requests alternating",
        seconds=90,
        least=60,
        on_cpu=False,  # takes long, as each of its two processes compiles an engine
    ),
    _watch(
        "updates",
        60,
        "command buffers that are recorded again, of 20 steps",
        environment=LOGGED_GRAPHS,
        on_cpu=False,  # a CPU has no command buffers
    ),
    _watch("arrivals", 100, "64 requests and a prompt a step: chunks and rounds apart, and joined"),
    _watch("compiling", 110, "steps of 16 requests while 8 programs are compiled behind them"),
    _kernels("latents", 60, "latent attention at the shapes of GLM-4.7-Flash and DeepSeek-V3"),
    Case(
        name="small",
        function="grid:measure_models",
        about="Llama-3.2-1B + EAGLE-1 and Qwen3.5-4B + MTP, K 0 and 3, 1 request",
        seconds=80,
        least=40,
        arguments={"names": ("Llama-3.2-1B", "Qwen3.5-4B"), "batches": (1,)},
        on_cpu=False,  # models/Qwen3.5-4B is of the same kind
    ),
    Case(
        name="early_launch",
        function="host:measure_early_launch",
        about="steps of three models, K 0 and 3, 1 request, launched early or not",
        seconds=160,
        least=50,
        arguments={"names": ("Llama-3.2-1B", "Llama-3.1-8B", "Qwen3.5-4B")},
        on_cpu=False,  # `Step` runs in host/1
    ),
    Case(
        name="prefill",
        function="prefill:measure_prefill",
        about="32 prompts of 1,900 tokens, Llama-3.1-8B: tokens/s, and part of the card's product",
        seconds=60,
        least=40,
        on_cpu=False,  # an engine as in grid/1
    ),
    Case(
        name="adaptive",
        function="adaptive:measure_adaptive",
        about="adaptive K against K 0 to 3 at 1, 4, 16 and 64 requests, Llama-3.1-8B + EAGLE-1",
        seconds=240,
        least=120,
    ),
    Case(
        name="loading",
        function="start:measure_loading",
        about="a random checkpoint of 5.6 GB, against a plain read of its file",
        seconds=150,
        least=90,
    ),
    Case(
        name="start",
        function="start:measure_start",
        about="an engine until its first token and its last program, without and with kept ones",
        seconds=200,
        least=120,
        on_cpu=False,  # two processes that compile all of an engine's programs take a minute
    ),
    _tokens("demo-llama", "bfloat16"),
    _tokens("demo-qwen3.5", "bfloat16"),
    *(
        Case(
            name=f"parallel/{name}",
            function="parallel:measure_parallel",
            about=f"{name} divided over 2, 4 and 8 GPUs, K 0 and 3, 1 and 64 requests",
            seconds=300,
            least=60,
            arguments={"name": name, "counts": (2, 4, 8), "batches": (1, 64)},
            on_cpu=name == "Llama-3.1-8B",
        )
        for name in ("Llama-3.1-8B", "Qwen3.5-27B")
    ),
    _kernels("tiles", 150, "paged attention with other tiles", on_cpu=False),
    Case(
        name="kernels/scaled",
        function="scaled:time_scaled",
        about="Llama-3.1-8B's matmuls in 8 and 4 bits, in XLA's ways and with several tilings",
        seconds=150,
        least=60,
        environment=NO_GRAPHS,
    ),
    _grid(4, 60),
    _grid(128, 60),
    *(
        Case(
            name=f"projections/{name}",
            function="projections:time_matmuls",
            about=f"Llama-3.1-8B's matmuls at {' and '.join(map(str, rows))} rows, in XLA's ways",
            seconds=seconds,
            arguments={"num_rows": rows},
            environment=NO_GRAPHS,
            on_cpu=name == "few",
        )
        for name, rows, seconds in (("few", (8, 64), 80), ("many", (256, 384), 280))
    ),
    Case(
        name="peers/attention",
        function="peers:time_attention",
        about="FlashInfer, torch SDPA and jax's own paged_attention",
        seconds=50,
        environment=SHARED_MEMORY | NO_GRAPHS,
    ),
    Case(
        name="peers/delta_rule",
        function="peers:time_delta_rule",
        about="flash-linear-attention's recurrent kernel",
        seconds=90,
        environment=SHARED_MEMORY | NO_GRAPHS,
        on_cpu=False,
    ),
    Case(
        name="peers/transformers",
        function="peer_engines:time_transformers",
        about="transformers' Llama-3.1-8B, static cache, eager and torch.compile, 1 request",
        seconds=150,
        least=60,
        environment=SHARED_MEMORY,
        on_cpu=False,
    ),
    *(
        Case(
            name=f"peers/{name}",
            function=f"peer_engines:time_{name}",
            about=f"{name}'s Llama-3.1-8B without drafts, 1 and 64 requests",
            seconds=240,
            least=15,
            environment=SHARED_MEMORY,
            on_cpu=False,
        )
        for name in ("vllm", "sglang")
    ),
)


def select(names: list[str] | None) -> list[Case]:
    """Return the cases with these names or groups, in the order of `names`, without duplicates.

    Return all cases if `names` is None.

    Raises:
        ValueError: a name is unknown.
    """
    if not names:
        return list(CASES)
    found: dict[str, Case] = {}
    for name in names:
        named = {case.name: case for case in CASES if name in (case.name, case.group)}
        if not named:
            known = sorted({case.name for case in CASES} | {case.group for case in CASES})
            raise ValueError(f"--only has no case {name}; there are {known}")
        found = found | {key: case for key, case in named.items() if key not in found}
    return list(found.values())
