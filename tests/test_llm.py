"""The public door: what goes in, what comes out, and what is refused before any work."""

import dataclasses
import json

import numpy as np
import pytest
from support.engines import simulated_engines
from support.scripts import TextScript
from support.texts import simulated_llm, with_bytes

from specjax import LLM, CheckpointError, SamplingParams
from specjax.device.models.registry import load_model
from specjax.sampling_params import MAX_STOP_IDS
from specjax.text.seeds import derived_seed

VOCAB = 96
MAX_LEN = 64
EOS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SETTINGS = {"max_model_len": MAX_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 32}
SIMULATED = SETTINGS | {
    "page_size": 16,
    "decode_batches": None,
    "prefill_shapes": None,
    "script": TextScript(VOCAB),  # the same with drafts and without
}


@pytest.fixture(scope="module")
def target(checkpoints):
    return checkpoints.target("llama", num_hidden_layers=3, eos_token_id=EOS)


@pytest.fixture(scope="module")
def text_folder(checkpoints, target):
    """The target with a tokenizer of single bytes and a chat template."""
    folder = with_bytes(checkpoints, target.folder)
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def head(checkpoints, target):
    return checkpoints.eagle(target)


@pytest.fixture(scope="module")
def llm(text_folder, head):
    """With text and speculation, on a simulated device."""
    options = SIMULATED | {"model": head.folder, "k": 2}
    with simulated_llm(text_folder, "eagle", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids_only(target):
    """Without a tokenizer, on a simulated device."""
    with simulated_llm(target.folder, **SIMULATED) as llm:
        yield llm


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# --- prompts and outputs --------------------------------------------------------------------------


def test_forms_of_a_prompt(llm):
    ids = llm.tokenizer.encode("hello")
    array = np.array(ids)
    forms = [
        "hello",
        ["hello"],
        ids,
        tuple(ids),
        array,
        [ids],
        [array],
        {"prompt_token_ids": ids},
        {"prompt": "hello"},
        {"prompt": "hello", "prompt_token_ids": ids},
        [{"prompt_token_ids": array}],
    ]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert all(tokens(output) == tokens(outputs[0]) for output in outputs)
    with_text = [0, 1, 8, 9]
    expected = ["hello" if i in with_text else None for i in range(len(forms))]
    assert [output[0].prompt for output in outputs] == expected
    assert all(output[0].prompt_token_ids == ids for output in outputs)
    assert all(type(token) is int for token in outputs[4][0].prompt_token_ids)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_outputs_come_in_the_order_of_the_prompts(llm, ids_only, ragged_prompts):
    prompts = ragged_prompts(9, 2, 50, 1, 33)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 3, 2, 8)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in together] == prompts
    assert [len(ids) for ids in tokens(together)] == [9, 1, 3, 2, 8]
    alone = [
        ids_only.generate(p, s, use_tqdm=False)[0] for p, s in zip(prompts, params, strict=True)
    ]
    assert tokens(together) == tokens(alone)
    numbers = [int(output.request_id) for output in together]
    assert numbers == sorted(set(numbers))


def test_text_of_an_output(llm, ids_only):
    output = llm.generate("abc", GREEDY, use_tqdm=True)[0].outputs[0]
    assert output.text == llm.tokenizer.decode(output.token_ids)
    silent = dataclasses.replace(GREEDY, detokenize=False)
    assert llm.generate("abc", silent, use_tqdm=False)[0].outputs[0].text is None
    assert ids_only.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].text is None


def test_defaults_are_those_of_sampling_params(llm):
    output = llm.generate([1, 2, 3], use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) <= SamplingParams().max_tokens == 16
    assert SamplingParams().temperature == 1.0


def test_no_max_tokens_goes_to_the_end(ids_only):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = ids_only.generate([[1, 2, 3], [4] * (MAX_LEN - 1)], params, use_tqdm=False)
    assert [len(ids) for ids in tokens(outputs)] == [MAX_LEN - 3, 1]
    cut = ids_only.generate([1] * 60, dataclasses.replace(params, max_tokens=50), use_tqdm=False)
    assert len(tokens(cut)[0]) == MAX_LEN - 60


@pytest.mark.parametrize("which", ["llm", "ids_only"])
def test_the_end_of_sequence_ends_an_output(request, which):
    llm = request.getfixturevalue(which)
    tries = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=60, ignore_eos=True)
        for seed in range(16)
    ]
    outputs = [output.outputs[0] for output in llm.generate([[1, 2, 3]] * 16, tries, False)]
    assert all(len(output.token_ids) == 60 for output in outputs)
    assert {(output.finish_reason, output.stop_reason) for output in outputs} == {("length", None)}
    seed, long = next(
        (i, output.token_ids)
        for i, output in enumerate(outputs)
        if EOS in output.token_ids[3:-1] and EOS not in output.token_ids[:3]
    )
    until_eos = long[: long.index(EOS) + 1]

    ended = dataclasses.replace(tries[seed], ignore_eos=False)
    output = llm.generate([1, 2, 3], ended, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == until_eos
    assert (output.finish_reason, output.stop_reason) == ("stop", None)

    stop = until_eos[2]
    stopped = dataclasses.replace(ended, stop_token_ids=[stop])
    output = llm.generate([1, 2, 3], stopped, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == until_eos[: until_eos.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_seeds(llm):
    prompt, hot = [7, 8, 9], SamplingParams(temperature=1.5, seed=1, max_tokens=20)
    first = tokens(llm.generate(prompt, hot, use_tqdm=False))
    assert first == tokens(llm.generate(prompt, hot, use_tqdm=False))
    other = dataclasses.replace(hot, seed=2)
    assert first != tokens(llm.generate(prompt, other, use_tqdm=False))
    unseeded = dataclasses.replace(hot, seed=None)
    one, two = tokens(llm.generate([prompt, prompt], unseeded, use_tqdm=False))
    assert one != two


def test_chat(llm):
    talk = [{"role": "user", "content": "hi"}]
    expected = llm.generate("user:hi;assistant:", GREEDY, use_tqdm=False)
    assert tokens(llm.chat(talk, GREEDY, use_tqdm=False)) == tokens(expected)
    two = llm.chat([talk, [*talk, *talk]], GREEDY, use_tqdm=False)
    assert len(two) == 2 and tokens(two)[0] == tokens(expected)[0]
    with pytest.raises(ValueError, match="no tools"):
        llm.chat([{"role": "tool", "content": "hi"}], GREEDY, use_tqdm=False)


def test_chat_needs_a_tokenizer_and_a_template(ids_only, llm, monkeypatch):
    talk = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="tokenizer"):
        ids_only.chat(talk, GREEDY, use_tqdm=False)
    monkeypatch.setattr(llm, "tokenizer", dataclasses.replace(llm.tokenizer, template=None))
    with pytest.raises(CheckpointError, match="no chat template"):
        llm.chat(talk, GREEDY, use_tqdm=False)


def test_metrics(llm):
    before = llm.metrics()
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate([[1, 2, 3], [4] * 40], params, use_tqdm=False)
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


def test_what_it_is_shows(llm, ids_only, text_folder):
    sizes = f"max_num_seqs=2, max_model_len={MAX_LEN}, num_pages="
    shown = f"LLM({str(text_folder)!r}, dtype='float32', method='eagle', K=2, {sizes}"
    assert repr(llm).startswith(shown) and len(repr(llm)) < len(shown) + 30
    assert f"dtype='float32', {sizes}" in repr(ids_only)


def test_a_closed_llm_says_so(target):
    with simulated_llm(target.folder, **SIMULATED) as llm:
        assert llm.generate([1], GREEDY, use_tqdm=False)
    llm.close()
    assert repr(llm) == f"LLM({str(target.folder)!r}, closed)"
    for use in (lambda: llm.generate([1]), lambda: llm.chat([]), llm.metrics):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_model_value_with_params(target):
    """Tokens of the simulated device hang on the weights here."""
    model, params = load_model(target.folder, np.dtype(np.float32))
    plain = dataclasses.replace(GREEDY, ignore_eos=True)
    with simulated_engines(), LLM(model, params=params, verbose=False, **SETTINGS) as llm:
        outputs = tokens(llm.generate([1, 2, 3], plain, use_tqdm=False))
    with simulated_llm(target.folder, **SIMULATED | {"script": None}) as llm:
        assert outputs == tokens(llm.generate([1, 2, 3], plain, use_tqdm=False))
        assert outputs != tokens(llm.generate([1, 2, 4], plain, use_tqdm=False))


def test_an_interrupt_leaves_a_usable_llm(llm, monkeypatch, ragged_prompts):
    prompts = ragged_prompts(9, 2, 50, 1, 33)
    expected = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    step, num_steps = llm.engine.step, iter(range(5))

    def interrupted():
        if next(num_steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.engine.scheduler.pages.num_free == llm.engine.scheduler.pages.num_pages
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


def test_prompt_budget_and_pages_of_exactly_one_request(target):
    """The smallest settings that hold one request work, and serve several in turn."""
    settings = {"max_model_len": 40, "page_size": 8, "num_pages": 5, "max_num_seqs": 2}
    with simulated_llm(target.folder, **SIMULATED | settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        outputs = llm.generate([[1, 2], [3, 4], [5, 6]], params, use_tqdm=False)
    assert [len(ids) for ids in tokens(outputs)] == [38, 38, 38]


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["llm", "ids_only"])
@pytest.mark.parametrize("seed", [4, None])
def test_samples_are_those_of_single_requests(request, ragged_prompts, which, seed):
    """With the seeds that are derived for them, whatever part of the prompt they share."""
    llm = request.getfixturevalue(which)
    prompts = ragged_prompts(1, 16, 17, 45)
    params = SamplingParams(
        temperature=1.2, seed=seed, n=3, max_tokens=9, ignore_eos=True, detokenize=False
    )
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == prompts
    for result in results:
        assert [output.index for output in result.outputs] == [0, 1, 2]
        assert len({tuple(output.token_ids) for output in result.outputs}) == 3
        assert all(output.text is None for output in result.outputs)
    for result in results:
        # Without a seed, the engine's own and the number of the request make one.
        first = derived_seed(0, int(result.request_id)) if seed is None else seed
        seeds = [first, derived_seed(first, 1), derived_seed(first, 2)]
        single = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
        alone = llm.generate([result.prompt_token_ids] * 3, single, use_tqdm=False)
        assert tokens(alone) == [output.token_ids for output in result.outputs]


def test_more_samples_than_run_at_once(llm):
    """Greedy ones are all the same, and each ends by itself."""
    before = llm.metrics()
    params = SamplingParams(temperature=0, n=5, max_tokens=7, ignore_eos=True)
    one, two = llm.generate([[1, 2, 3], [4] * 40], params, use_tqdm=False)
    for result in one, two:
        assert len(result.outputs) == 5 and len(result.outputs[0].token_ids) == 7
        assert all(output.token_ids == result.outputs[0].token_ids for output in result.outputs)
        assert all(output.text == result.outputs[0].text for output in result.outputs)
    after = llm.metrics()
    assert after.num_generation_tokens - before.num_generation_tokens == 2 * 5 * 7
    # The others start where whole pages end, with the last token of the prompt at the latest.
    assert after.num_prompt_tokens - before.num_prompt_tokens == 5 * 3 + 40 + 4 * 8
    hot = dataclasses.replace(params, temperature=2.0, seed=1, max_tokens=40, ignore_eos=False)
    outputs = llm.generate([1, 2, 3], hot, use_tqdm=False)[0].outputs
    assert len({len(output.token_ids) for output in outputs}) > 1
    for output in outputs:
        has_ended = output.token_ids[-1] == EOS
        assert EOS not in output.token_ids[:-1] and (has_ended or len(output.token_ids) == 40)
        assert output.finish_reason == ("stop" if has_ended else "length")


# --- bad requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([1] * MAX_LEN, [str(MAX_LEN), "max_model_len=64", "shorten"]),
        ([1] * 500, ["500", "max_model_len=64", "shorten"]),
        ("x" * 100, ["100", "max_model_len=64", "shorten"]),
        ([], ["empty"]),
        ("", ["empty"]),
        ({"prompt_token_ids": []}, ["empty"]),
        ([1, VOCAB], [f"token id {VOCAB}", f"vocabulary of {VOCAB}"]),
        ([1, -1], ["token id -1", "vocabulary"]),
        ([1, 2**40], ["token id"]),
        ([1, 2.0], ["integers"]),
        (["a", "b"], ["integers"]),
        (7, ["is 7", "list of token ids"]),
        (None, ["is None", "list of token ids"]),
        ({}, ["no keys"]),
        ({"prompt": ["x"]}, ["prompt=['x']", "text"]),
        ({"prompt": "x", "multi_modal_data": {}}, ["multi_modal_data", "prompt_token_ids"]),
        ({"prompt_token_ids": "text"}, ["prompt_token_ids='text'", "token ids"]),
        (b"hello", ["bytes", ".decode"]),
        ({"prompt_token_ids": b"hello"}, ["bytes", ".decode"]),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_and_nothing_is_lost(llm, prompt, words):
    before = llm.metrics()
    with pytest.raises(ValueError) as error:
        llm.generate([[1, 2], [3], prompt, [4]], GREEDY, use_tqdm=False)
    assert all(word in str(error.value) for word in ["prompt 2", *words]), str(error.value)
    assert llm.metrics() == before and not llm.engine.has_work
    assert len(llm.generate([[1, 2], [3], [4]], GREEDY, use_tqdm=False)) == 3


def test_text_without_a_tokenizer(ids_only):
    with pytest.raises(ValueError, match="prompt 0 is text.*no tokenizer.*token ids"):
        ids_only.generate("hello", GREEDY, use_tqdm=False)


def test_sampling_params_that_do_not_match_the_prompts(llm):
    with pytest.raises(ValueError, match="2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)


def test_a_stop_id_outside_the_vocabulary(llm):
    with pytest.raises(ValueError, match="stop_token_ids: token id 96 is outside"):
        llm.generate([1], SamplingParams(stop_token_ids=[VOCAB]), use_tqdm=False)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"temperature": -0.5}, ["temperature=-0.5"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"temperature": float("inf")}, ["temperature=inf"]),
        ({"max_tokens": 0}, ["max_tokens=0"]),
        ({"max_tokens": -3}, ["max_tokens=-3"]),
        ({"seed": 2**64}, [f"seed={2**64}"]),
        ({"stop_token_ids": [-4]}, ["stop_token_ids", "-4"]),
        ({"stop_token_ids": range(MAX_STOP_IDS + 1)}, ["stop_token_ids", "9", "8"]),
    ],
    ids=str,
)
def test_bad_sampling_params(fields, words):
    with pytest.raises(ValueError) as error:
        SamplingParams(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)
