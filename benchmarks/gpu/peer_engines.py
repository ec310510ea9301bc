"""Times engines of other libraries, if installed, with the same model on the same card."""

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from engines import CONFIGS, TINY, TINY_LLAMA, lengths
from peers import torch_times, try_peer
from timing import Setting, spread

MODEL = "Llama-3.1-8B"
BATCHES, REPEATS = (1, 64), 3

Generate = Callable[[list[list[int]], int], Any]  # takes prompts and the number of output tokens


def time_transformers(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time a decode step of transformers for one request.

    The request is about as long as the requests in `grid`.
    """
    row = {"what": "peer decode", "model": MODEL, "batch": 1}
    step: dict[str, Callable[[], Any]] = {}

    def eager() -> dict[str, Any]:
        step["run"] = _transformers_step(setting)
        return _decode_figures(step["run"], setting)

    def compiled() -> dict[str, Any]:
        torch = importlib.import_module("torch")
        start = time.perf_counter()
        run = torch.compile(step["run"], mode="reduce-overhead")
        run()
        found = {"compile_seconds": time.perf_counter() - start}
        return found | _decode_figures(run, setting)

    yield try_peer(row | {"peer": "transformers, eager"}, eager)
    if not setting.is_cpu:
        yield try_peer(row | {"peer": "transformers, torch.compile"}, compiled)


def _transformers_step(setting: Setting) -> Callable[[], Any]:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    sizes = setting.pick({}, TINY | TINY_LLAMA)
    config = transformers.AutoConfig.from_pretrained(CONFIGS / MODEL, **sizes)
    device = setting.pick("cuda", "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=640)
    ids = torch.ones((1, 128), dtype=torch.long, device=device)

    def run(ids, places):
        with torch.no_grad():
            arguments = {"past_key_values": cache, "cache_position": places}
            return model(ids, **arguments).logits.argmax(-1)

    run(ids, torch.arange(128, device=device))
    # All launches decode the same position; the next position would cost the same.
    return partial(run, ids[:, :1], torch.tensor([128], device=device))


def _decode_figures(run: Callable[[], Any], setting: Setting) -> dict[str, Any]:
    times = spread(torch_times(run, setting), 1e3)
    return {"ms_per_step": times["median"], "ms": times}


def time_vllm(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time vLLM with random weights and no drafts."""

    def start() -> Generate:
        vllm = importlib.import_module("vllm")
        llm = vllm.LLM(
            str(CONFIGS / MODEL), load_format="dummy", skip_tokenizer_init=True,
            max_model_len=1024, max_num_seqs=max(BATCHES), enable_prefix_caching=False,
        )  # fmt: skip

        def generate(prompts: list[list[int]], num_tokens: int) -> Any:
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            return llm.generate(given, params, use_tqdm=False)

        return generate

    yield from _time_engine("vllm", start, setting)


def time_sglang(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time SGLang with random weights and no drafts."""

    def start() -> Generate:
        sglang = importlib.import_module("sglang")
        engine = sglang.Engine(
            model_path=str(CONFIGS / MODEL), load_format="dummy", skip_tokenizer_init=True,
            context_length=1024, max_running_requests=max(BATCHES), disable_radix_cache=True,
        )  # fmt: skip

        def generate(prompts: list[list[int]], num_tokens: int) -> Any:
            params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
            return engine.generate(input_ids=prompts, sampling_params=params)

        return generate

    yield from _time_engine("sglang", start, setting)


def _time_engine(
    name: str, start: Callable[[], Generate], setting: Setting
) -> Iterator[dict[str, Any]]:
    """Yield the start-up time of an engine, and its milliseconds per token by batch size.

    If the library is not installed, yield only a line that says this.
    """
    generate: list[Generate] = []
    row = {"what": "peer decode", "model": MODEL, "peer": name}

    def started() -> dict[str, Any]:
        begun = time.perf_counter()
        generate.append(start())
        version = importlib.import_module(name).__version__
        return {"ms": (time.perf_counter() - begun) * 1e3, "peer_version": version}

    yield try_peer(row | {"what": "peer start"}, started)
    for batch in BATCHES if generate else ():
        timed = partial(_ms_per_token, generate[0], batch, setting)
        yield try_peer(row | {"batch": batch}, timed)


def _ms_per_token(generate: Generate, batch: int, setting: Setting) -> dict[str, Any]:
    """Measure milliseconds per token.

    They are computed from the difference between outputs of two lengths, so that the times of the
    prompts and of the call cancel.
    """
    prompt, long = lengths(setting)
    short = long // 4
    prompts = [[100 + i] * prompt for i in range(batch)]

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        generate(prompts, num_tokens)
        return time.perf_counter() - start

    for num_tokens in short, long:  # compiles
        seconds(num_tokens)
    times = [(seconds(long) - seconds(short)) / (long - short) for _ in range(REPEATS)]
    ms = spread(times, 1e3)
    return {"ms_per_step": ms["median"], "ms": ms}
