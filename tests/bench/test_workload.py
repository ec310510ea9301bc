"""The prompts in the package, and the requests that are made from them."""

import pytest

from specjax.bench.workload import make_requests, read_questions, tokenize
from specjax.text.tokenizer import ChatTokenizer
from specjax.train.data import train_tokenizer

OPTIONS = dict(max_tokens=8, max_model_len=32, temperature=0.5, seed=5, stop_ids=(1,))


def test_questions_are_distinct_texts():
    questions = read_questions()
    assert len(questions) == len(set(questions)) == 24
    assert all(question.strip() for question in questions)


@pytest.mark.parametrize("template", [None, "Q: {{ messages[0]['content'] }}"])
def test_prompts_follow_the_checkpoints_template(template):
    bpe = train_tokenizer(read_questions(), 300)
    tokenizer = ChatTokenizer(bpe, template, {}, "here")
    [prompt] = tokenize(["Why?"], tokenizer)
    assert tokenizer.decode(prompt) == ("Why?" if template is None else "Q: Why?")


def test_requests_are_what_the_options_say_and_seeds_depend_on_place_alone():
    requests = make_requests([(3, 4), (5,)], **OPTIONS)
    assert [request.seeds for request in requests] == [(5,), (6,)]
    assert requests[0].prompt_token_ids == (3, 4) and requests[0].stop_ids == (1,)
    for request in requests:
        assert request.params.temperature == 0.5 and request.max_tokens == 8
        assert not request.params.edits_logits and request.params.logprobs is None
    last = make_requests([(3,)] * 2, **(OPTIONS | {"seed": 2**32 - 1}))
    assert [request.seeds for request in last] == [(2**32 - 1,), (0,)]


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="longest prompt has 25 tokens.*raise --max-model-len"):
        make_requests([(3,) * 25], **OPTIONS)
