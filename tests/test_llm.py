"""The public class `LLM`: its inputs and outputs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.engines import ANY_SHAPES, generate, generate_tokens, simulated_engines, tokens_of
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes

from specjax import LLM, SamplingParams
from specjax.device.models.registry import load_model
from specjax.text.seeds import derived_seed

VOCAB, MAX_LEN, EOS = 96, 64, 5
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SETTINGS = {"max_model_len": MAX_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 32}
SIMULATED = SETTINGS | {
    "page_size": 16,
    **ANY_SHAPES,
    "script": TextScript(VOCAB),  # the same with drafts and without
}


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", num_hidden_layers=3, eos_token_id=EOS)


@pytest.fixture(scope="module")
def llm(checkpoints, target):
    """An LLM with speculation, a tokenizer of single bytes and a chat template."""
    folder = with_bytes(checkpoints, target.folder)
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with simulated_llm(folder, "ngram", k=2, **SIMULATED) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids_only(target):
    """An LLM without a tokenizer."""
    with simulated_llm(target.folder, **SIMULATED) as llm:
        yield llm


# --- prompts and outputs --------------------------------------------------------------------------


def test_forms_of_a_prompt(llm):
    ids = llm.tokenizer.encode("hello")
    array = np.array(ids)
    forms = [
        ("hello", True),
        (["hello"], True),
        (ids, False),
        (tuple(ids), False),
        (array, False),
        ([ids], False),
        ([array], False),
        ({"prompt_token_ids": ids}, False),
        ({"prompt": "hello"}, True),
        ({"prompt": "hello", "prompt_token_ids": ids}, True),
        ([{"prompt_token_ids": array}], False),
    ]
    expected = generate_tokens(llm, ids, GREEDY)
    for form, has_text in forms:
        (output,) = generate(llm, form, GREEDY)
        assert tokens_of([output]) == expected
        assert output.prompt == ("hello" if has_text else None)
        assert output.prompt_token_ids == ids
        assert all(type(token) is int for token in output.prompt_token_ids)


def test_outputs_come_in_the_order_of_the_prompts(llm, ids_only, ragged_prompts):
    prompts, lengths = ragged_prompts(9, 2, 50, 1, 33), [9, 1, 3, 2, 8]
    params = [replace(GREEDY, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in tokens_of(outputs)] == lengths
    pairs = zip(prompts, params, strict=True)
    assert tokens_of(outputs) == [generate_tokens(ids_only, *pair)[0] for pair in pairs]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == sorted(set(numbers))


def test_text_of_an_output(llm, ids_only):
    output = llm.generate("abc", GREEDY, use_tqdm=True)[0].outputs[0]
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert generate(llm, "abc", replace(GREEDY, detokenize=False))[0].outputs[0].text is None
    assert generate(ids_only, [1, 2], GREEDY)[0].outputs[0].text is None


def test_no_max_tokens_goes_to_the_end(target, ids_only):
    """Pages suffice for one request of full length, so several requests take turns."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (cut,) = generate_tokens(ids_only, [1] * 60, replace(params, max_tokens=50))
    assert len(cut) == MAX_LEN - 60
    settings = {"max_model_len": 40, "page_size": 8, "num_pages": 5}
    with simulated_llm(target.folder, **SIMULATED | settings) as llm:
        outputs = generate_tokens(llm, [[1, 2], [3, 4], [5] * 39], params)
    assert [len(ids) for ids in outputs] == [38, 38, 1]


@pytest.mark.parametrize("which", ["llm", "ids_only"])
def test_the_end_of_sequence_ends_an_output(request, which):
    llm, prompt = request.getfixturevalue(which), [1, 2, 3]
    hot = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
    tries = [replace(hot, seed=seed) for seed in range(16)]
    outputs = [output.outputs[0] for output in generate(llm, [prompt] * 16, tries)]
    assert all(len(output.token_ids) == 60 for output in outputs)
    assert {(output.finish_reason, output.stop_reason) for output in outputs} == {("length", None)}
    seed, ids = next(
        (i, output.token_ids)
        for i, output in enumerate(outputs)
        if EOS in output.token_ids[3:-1] and EOS not in output.token_ids[:3]
    )
    ended = replace(tries[seed], ignore_eos=False)
    stop = ids[2]
    for params, last, reason in (
        (ended, EOS, None),
        (replace(ended, stop_token_ids=[stop]), stop, stop),
    ):
        output = generate(llm, prompt, params)[0].outputs[0]
        assert output.token_ids == ids[: ids.index(last) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", reason)


def test_seeds(llm):
    prompt, hot = [7, 8, 9], SamplingParams(temperature=1.5, seed=1, max_tokens=20)
    first, again = (generate_tokens(llm, prompt, hot) for _ in range(2))
    assert first == again != generate_tokens(llm, prompt, replace(hot, seed=2))
    one, two = generate_tokens(llm, [prompt, prompt], replace(hot, seed=None))
    assert one != two


def test_chat(llm):
    talk, text = [{"role": "user", "content": "hi"}], "user:hi;"
    outputs = llm.chat(talk, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == generate_tokens(llm, f"{text}assistant:", GREEDY)
    outputs = llm.chat([talk, [*talk, *talk]], GREEDY, use_tqdm=False)
    assert [one.prompt for one in outputs] == [f"{text}assistant:", f"{text}{text}assistant:"]


def test_texts_need_a_tokenizer(ids_only):
    with pytest.raises(ValueError, match="prompt 0 is text.*no tokenizer.*token ids"):
        generate(ids_only, "hello", GREEDY)
    with pytest.raises(ValueError, match="no tokenizer"):
        ids_only.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


def test_metrics(llm):
    before = llm.metrics()
    generate(llm, [[1, 2, 3], [4] * 40], replace(GREEDY, max_tokens=9, ignore_eos=True))
    after = llm.metrics()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 43
    assert after.num_generation_tokens - before.num_generation_tokens == 18
    # Towards the end of an output there is room for one draft only.
    assert after.num_drafts < after.num_draft_tokens < 2 * after.num_drafts
    assert sum(after.num_accepted_tokens_per_pos) == after.num_accepted_tokens
    length = 1 + after.num_accepted_tokens / after.num_drafts
    assert after.mean_acceptance_length == pytest.approx(length)
    assert after.k_histogram == {2: after.num_decode_steps}
    assert json.loads(json.dumps(after.as_dict()))["num_drafts"] == after.num_drafts


def test_what_it_is_shows(llm, target):
    sizes = f"max_num_seqs=2, max_model_len={MAX_LEN}, num_pages="
    assert f", dtype='float32', method='ngram', K=2, {sizes}" in repr(llm)
    with simulated_llm(target.folder, **SIMULATED) as other:
        assert f"LLM({str(target.folder)!r}, dtype='float32', {sizes}" in repr(other)
    assert repr(other) == f"LLM({str(target.folder)!r}, closed)"


def test_a_model_value_with_params(target):
    """With this script, tokens of the simulated device depend on the weights."""
    model, params = load_model(target.folder, np.dtype(np.float32))
    plain = replace(GREEDY, ignore_eos=True)
    with simulated_engines(), LLM(model, params=params, verbose=False, **SETTINGS) as llm:
        outputs = generate_tokens(llm, [1, 2, 3], plain)
    with simulated_llm(target.folder, **SIMULATED | {"script": None}) as llm:
        assert outputs == generate_tokens(llm, [1, 2, 3], plain)
        assert outputs != generate_tokens(llm, [1, 2, 4], plain)


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["llm", "ids_only"])
@pytest.mark.parametrize("seed", [4, None])
def test_samples_are_those_of_single_requests(request, ragged_prompts, which, seed):
    """Samples equal single requests with the derived seeds, for any shared part of a prompt."""
    llm, prompts = request.getfixturevalue(which), ragged_prompts(1, 16, 17, 45)
    params = SamplingParams(temperature=1.2, seed=seed, n=3, max_tokens=9, ignore_eos=True)
    results = generate(llm, prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    for result in results:
        assert [output.index for output in result.outputs] == [0, 1, 2]
        # Without a seed, the engine's own and the number of the request make one.
        first = derived_seed(0, int(result.request_id)) if seed is None else seed
        seeds = [first, derived_seed(first, 1), derived_seed(first, 2)]
        single = [replace(params, n=1, seed=seed) for seed in seeds]
        alone = generate_tokens(llm, [result.prompt_token_ids] * 3, single)
        assert alone == tokens_of([result]) and len(set(map(tuple, alone))) == 3


def test_more_samples_than_run_at_once(llm):
    """Greedy samples are all equal, and sampled ones end at different lengths."""
    before = llm.metrics()
    params = SamplingParams(temperature=0, n=5, max_tokens=7, ignore_eos=True)
    for result in generate(llm, [[1, 2, 3], [4] * 40], params):
        first, *others = [(output.token_ids, output.text) for output in result.outputs]
        assert others == [first] * 4 and len(first[0]) == 7
    after = llm.metrics()
    assert after.num_generation_tokens - before.num_generation_tokens == 2 * 5 * 7
    # The others start where whole pages end, with the last token of the prompt at the latest.
    assert after.num_prompt_tokens - before.num_prompt_tokens == 5 * 3 + 40 + 4 * 8
    hot = replace(params, temperature=2.0, seed=1, max_tokens=40, ignore_eos=False)
    outputs = generate(llm, [1, 2, 3], hot)[0].outputs
    assert len({len(output.token_ids) for output in outputs}) > 1
    for output in outputs:
        has_ended = output.token_ids[-1] == EOS
        assert EOS not in output.token_ids[:-1] and (has_ended or len(output.token_ids) == 40)
        assert output.finish_reason == ("stop" if has_ended else "length")
