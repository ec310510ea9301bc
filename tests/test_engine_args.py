"""`EngineArgs`, and other calls of vLLM's asynchronous scripts; simulated."""

import asyncio
import inspect
import re
from dataclasses import asdict
from typing import get_type_hints

import pytest
from support.engines import SIZES, simulated_engines
from support.scripts import TextScript
from support.texts import VOCAB

from specjax import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams, SpeculativeConfig
from specjax.serving.options import DEFAULTS, LLMOptions

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = 480  # tokens, of models of 512


@pytest.fixture(scope="module")
def expected(letters):
    with simulated_engines(TextScript(VOCAB)), LLM(**asdict(EngineArgs(letters, **SIZES))) as llm:
        assert llm.engine.config.page_size == SIZES["page_size"]
        return llm.generate([1, 2, 3], PARAMS)[0].outputs[0].token_ids


def run(letters, script, **options):
    """Run a coroutine function with an AsyncLLM, and return its result."""
    with simulated_engines(TextScript(VOCAB)):
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=letters, **SIZES | options))
    try:
        return asyncio.run(asyncio.wait_for(script(llm), 60))
    finally:
        llm.shutdown()


def test_they_are_the_options_of_the_llm():
    entries = re.findall(r"^    (\w+(?:, \w+)*): ", inspect.getdoc(LLM) or "", re.MULTILINE)
    documented = [name for entry in entries for name in entry.split(", ")]
    types = get_type_hints(LLMOptions)
    assert list(types) == list(DEFAULTS) == [name for name in documented if name in types]
    assert not types.keys() - set(documented)
    more = {"max_num_requests": None, "verbose": False}
    for args, own in (EngineArgs, {}), (AsyncEngineArgs, more):
        given = {"model": "folder", "max_num_seqs": 3}
        assert asdict(args(**given)) == DEFAULTS | own | given
        assert args("a") == args(model="a") != args("b")


def test_a_value_among_them_is_its_fields(letters):
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    made = asdict(EngineArgs(letters, speculative_config=config))["speculative_config"]
    assert SpeculativeConfig.of(made) == config


def test_options_are_checked_where_they_are_written():
    with pytest.raises(TypeError, match="'max_seqs'; did you mean 'max_num_seqs'"):
        EngineArgs("folder", max_seqs=3)
    with pytest.raises(ValueError, match="load_format='dummy'"):
        AsyncEngineArgs("folder", load_format="dummy")
    with pytest.warns(UserWarning, match="enforce_eager, enable_log_requests"):
        args = AsyncEngineArgs("folder", enforce_eager=True, enable_log_requests=True)
    assert args == AsyncEngineArgs("folder")


def test_a_length_that_yarn_allows(checkpoints, letters):
    """Qwen3's card describes this config. One more position is refused."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    folder = checkpoints.copy(letters, max_position_embeddings=40960, rope_scaling=rope)
    sizes = SIZES | {"max_model_len": 131072, "page_size": 1024}
    with simulated_engines(TextScript(VOCAB)):
        with LLM(**asdict(EngineArgs(folder, **sizes))) as llm:
            assert llm.engine.config.max_model_len == 131072
        with pytest.raises(ValueError, match="131073 exceeds the 131072 positions"):
            LLM(**asdict(EngineArgs(folder, **sizes | {"max_model_len": 131073})))


def test_a_script_that_streams(letters, expected):
    async def script(llm):
        prompt = {"prompt_token_ids": [1, 2, 3]}
        outputs = llm.generate(request_id="one", prompt=prompt, sampling_params=PARAMS)
        *_, last = [output async for output in outputs]
        return last

    assert run(letters, script, max_num_requests=2).outputs[0].token_ids == expected


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(letters, expected, level):
    async def script(llm):
        assert not await llm.is_sleeping()
        request = await llm._ask(lambda: llm._llm.make_request([1, 2, 3], PARAMS))
        await llm.sleep(level)
        assert await llm.is_sleeping()
        with pytest.raises(RuntimeError, match="asleep; call wake_up"):
            await llm.generate([1, 2, 3], PARAMS)
        with pytest.raises(RuntimeError, match="asleep; call wake_up"):
            await llm._ask(llm._llm.start, request)  # which waited for a turn
        await llm.wake_up()
        assert not await llm.is_sleeping()
        with pytest.raises(ValueError, match="level=3"):
            await llm.sleep(3)
        return await llm.generate([1, 2, 3], PARAMS)

    assert run(letters, script).outputs[0].token_ids == expected


def test_no_sleep_while_requests_run(letters, expected):
    async def script(llm):
        stream = llm.generate([1, 2, 3], SamplingParams(n=8, max_tokens=LONG, ignore_eos=True))
        async for _ in stream:
            with pytest.raises(RuntimeError, match="have not finished"):
                await llm.sleep()
            assert not await llm.reset_prefix_cache()
            break
        await stream.aclose()
        while not await llm.reset_prefix_cache():
            await asyncio.sleep(0.001)
        return await llm.generate([1, 2, 3], PARAMS)

    sizes = {"max_model_len": LONG + 16, "num_pages": None}
    assert run(letters, script, **sizes).outputs[0].token_ids == expected


def test_a_tokenizer_and_a_profile(letters, tmp_path):
    async def script(llm):
        tokenizer = llm.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
        await llm.start_profile(str(tmp_path))
        await llm.generate([1], PARAMS)
        await llm.stop_profile()
        assert [*tmp_path.rglob("*.xplane.pb")]
        llm.shutdown()
        for ask in llm.sleep, llm.wake_up, llm.is_sleeping, llm.reset_prefix_cache:
            with pytest.raises(RuntimeError, match="AsyncLLM is closed"):
                await ask()

    run(letters, script)
