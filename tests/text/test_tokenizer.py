"""A folder's tokenizer files, compared with transformers; and files that cannot be read."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from support.decoders import SPELLED, make_case, wrap
from support.refusals import label, refusal
from support.texts import write_files
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint.save import copy_tokenizer
from specjax.checkpoint.token_map import read_texts
from specjax.text.tokenizer import ChatTokenizer, load_tokenizer, read_eos_ids

DEMO = Path(__file__).parents[2] / "checkpoints/demo-llama"
TEXT = "<s>a b</s> <tool>c <img>\n</s><|end|>d  <pad>"
BOS = {"content": "<s>"} | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
END = BOS | {"content": "<|end|>", "rstrip": True}
MAP = {"bos_token": BOS, "eos_token": "</s>"}
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
CUT = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
PADS = {"strategy": {"Fixed": 30}, "direction": "Left", "pad_to_multiple_of": None}
PADS |= {"pad_id": 7, "pad_type_id": 0, "pad_token": "<pad>"}
TOKENIZER_FILES = [
    {},
    {"tokenizer.json": {"truncation": CUT}},
    {"tokenizer.json": {"padding": PADS}},
    {CONFIG: {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", **END}}},
    {SPECIAL: MAP},
    {SPECIAL: MAP, CONFIG: {"eos_token": "<|end|>", "add_bos_token": True, "add_eos_token": True}},
    {SPECIAL: MAP, CONFIG: {"added_tokens_decoder": {"257": END, "300": BOS}}},
    {SPECIAL: MAP, CONFIG: {"added_tokens_decoder": {}}},
    {CONFIG: {"added_tokens_decoder": {"9": BOS | {"special": True}}, "bos_token": "<s>"}},
    {"added_tokens.json": {"<tool>": 258, "<s>": 257}, SPECIAL: MAP},
    {"added_tokens.json": {"<tool>": 257}},
    {CONFIG: {"extra_special_tokens": ["<tool>", "<|end|>"]}},
    {CONFIG: {"additional_special_tokens": ["<tool>"]}},
    {SPECIAL: {"additional_special_tokens": ["<tool>", "<img>"]}},
    {SPECIAL: {"extra_special_tokens": [END]}, CONFIG: {"extra_special_tokens": ["<tool>"]}},
    {CONFIG: {"extra_special_tokens": {"image_token": "<img>", "end": "<|end|>"}}},
    {CONFIG: {"image_token": "<img>", "eos_token": None}},
    {CONFIG: {"split_special_tokens": True, "bos_token": "<s>"}},
    {CONFIG: {"image_token": "<tool>"}},
    {CONFIG: {"image_token": "<img>"}, SPECIAL: {"image_token": "<|end|>"}},
    {CONFIG: {"additional_special_tokens": []}, SPECIAL: {"additional_special_tokens": ["<img>"]}},
    {CONFIG: {"extra_special_tokens": {"e": "<img>"}, "additional_special_tokens": ["<|end|>"]}},
    {CONFIG: {"extra_special_tokens": {"e": "<img>"}}, SPECIAL: {"extra_special_tokens": [END]}},
]


@pytest.mark.parametrize("files", TOKENIZER_FILES, ids=label)
@pytest.mark.parametrize("known", [(), (AddedToken("<tool>"), AddedToken("<s>", special=True))])
def test_tokens_are_those_of_transformers(tmp_path, files, known):
    ours = load_tokenizer(write_files(tmp_path, files, *known))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None and ours.special_tokens == theirs.special_tokens_map
    ids = ours.encode(TEXT, add_special_tokens=False)
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    eos = theirs.eos_token_id
    assert read_eos_ids(tmp_path, ours) == (() if eos is None else (eos,))
    texts = read_texts(tmp_path)
    assert texts is not None
    assert texts.texts == {i: text.replace("Ġ", " ") for text, i in theirs.get_vocab().items()}


WHOLE = "naïve 🙂 世界"


@pytest.mark.parametrize("kind", SPELLED)
def test_texts_of_tokens_make_up_the_text(kind):
    """As in vLLM's logprobs, the last token of a character has the character as its text."""
    case = make_case(kind)
    assert case.byte_ids is not None
    tokenizer, ids = case.tokenizer, [case.byte_ids[byte] for byte in WHOLE.encode()]
    texts = [tokenizer.decode_token(token, ids[max(0, i - 4) : i]) for i, token in enumerate(ids)]
    bare = WHOLE.replace(" ", "") if kind == "llama-2" else WHOLE  # Strip, of a token by itself
    assert "".join(texts) == bare and texts.count("") == len(WHOLE.encode()) - len(bare)
    emoji = WHOLE.encode().index("🙂".encode()[0])
    assert tokenizer.decode_token(ids[emoji + 3], ids[emoji + 1 : emoji + 3]) == ""
    assert tokenizer.decode_token(ids[0], ids[emoji : emoji + 2]) == "n"


def test_texts_of_tokens_have_the_spaces_of_their_names():
    tokenizer = Tokenizer(models.WordLevel({"▁▁a": 0, "▁": 1, "a▁": 2}, "▁"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    assert list(map(wrap(tokenizer).decode_token, range(3))) == ["  a", " ", "a"]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert list(map(wrap(tokenizer).decode_token, range(3))) == ["a", "", "a"]


def test_ends_of_sequence_are_the_files_and_the_tokenizers(tmp_path):
    tokenizer = load_tokenizer(write_files(tmp_path, {SPECIAL: MAP}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 256, 9]}')
    assert read_eos_ids(tmp_path, tokenizer) == (5, 256, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_eos_ids(tmp_path, tokenizer) == (5, 256) and read_eos_ids(tmp_path, None) == (5,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_more_ends_of_sequence_than_a_request_can_have(tmp_path, file):
    tokenizer = load_tokenizer(write_files(tmp_path, {SPECIAL: MAP}))
    (tmp_path / file).write_text('{"eos_token_id": [0, 1, 2, 3, 4, 5, 6, 7, 7]}')
    assert read_eos_ids(tmp_path, None) == tuple(range(8))
    words = "eos_token_id=[0, 1, 2, 3, 4, 5, 6, 7, 7]", "9 ids", "at most 8"
    refusal(lambda: read_eos_ids(tmp_path, tokenizer), tmp_path / file, *words)


def test_copies_hold_all_files_of_a_tokenizer(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    files = {SPECIAL: MAP, "added_tokens.json": {"<tool>": 258, "<s>": 257}}
    write_files(source, files | {"additional_chat_templates/tool_use.jinja": "tools"})
    copy_tokenizer(source, copy)
    before, after = load_tokenizer(source), load_tokenizer(copy)
    assert after.encode(TEXT) == before.encode(TEXT)
    assert after.named_templates == before.named_templates == {"tool_use": "tools"}


def test_a_folder_with_only_a_sentencepiece_model(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    refusal(lambda: load_tokenizer(tmp_path), tmp_path, "tokenizer.model", "save_pretrained")


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded():
    """Otherwise, one client of a server would stop all others."""
    tokenizer = load_tokenizer(DEMO)
    text = "What is 3 + 4? " * 40_000
    plain = tokenizer.tokenizer.encode(text).ids
    for work, given, expected in (tokenizer.encode, text, plain), (tokenizer.decode, plain, text):
        with ThreadPoolExecutor() as threads:
            found, num_turns = threads.submit(work, given), 0
            while not found.done():
                num_turns += 1
                time.sleep(0.001)
        assert found.result() == expected and num_turns > 3


def test_a_text_that_is_much_too_long_is_refused_early():
    tokenizer = load_tokenizer(DEMO)
    text = "What is 3 + 4? " * 40_000
    sizes = []
    encode = ChatTokenizer._encode
    with patch.object(
        ChatTokenizer, "_encode", lambda self, x, *_: sizes.append(len(x)) or encode(self, x, *_)
    ):
        with pytest.raises(ValueError, match="more than 200 tokens, and at most 100 fit"):
            tokenizer.encode(text, max_tokens=100)
        assert sizes == [1600]
        tokens = tokenizer.encode(text[:15_000], max_tokens=len(text))
        assert tokens == tokenizer.tokenizer.encode(text[:15_000]).ids and sizes[1:] == [15_000]
