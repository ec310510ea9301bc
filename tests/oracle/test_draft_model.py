"""Draft models with another tokenizer, compared with transformers and a slow token map.

conftest.py runs the engine. The tokenizers are trained here, on texts that share some letters.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from support.refusals import refusal
from support.weights import TargetFiles
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from specjax import LLM

torch = pytest.importorskip("torch")

TEXT = ["a bad cab had a bed and a head", "dad had a cab bad", "bead a dab he had"]
SIZES = 24, 20  # of the target's vocabulary and the drafter's


def byte_level(size, texts=TEXT):
    """Return a tokenizer that writes a space as Ġ, and has no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    return tokenizer


def sentence_piece(size, texts=TEXT):
    """Return a tokenizer that writes a space as ▁, and has an unknown token (not token 0)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_tokenizer(checkpoints, model, tokenizer):
    folder = checkpoints.copy(model.folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TargetFiles(folder, model.hf)


@dataclass(frozen=True)
class OracleModel:
    """A draft model that runs over the whole text for each draft.

    Tokens are mapped by their texts.
    """

    hf: Any
    texts: tuple[dict[int, str], dict[int, str]]  # by id, of the target and the drafter
    unknown: int

    def fuse(self, final, entering):
        return final

    def as_own(self, token):
        same = [id for id, text in self.texts[1].items() if text == self.texts[0].get(token)]
        return same[0] if same else self.unknown

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        found, committed = [], tokens[: length + 1]
        while len(found) < num_drafts:
            own = [self.as_own(token) for token in [*committed, *found]]
            logits = self.hf(torch.tensor([own])).logits[0, -1]
            row = torch.full((SIZES[0],), -torch.inf)
            for token in self.texts[0]:
                if self.texts[0][token] in self.texts[1].values():
                    row[token] = logits[self.as_own(token)]
            found.append(choose(row, [*committed, *found]))
        return found


def texts_of(tokenizer):
    vocabulary = tokenizer.get_vocab()
    return {id: text.replace("Ġ", " ").replace("▁", " ") for text, id in vocabulary.items()}


@pytest.fixture(scope="module")
def target(checkpoints):
    model = checkpoints.target("llama", vocab_size=SIZES[0], num_hidden_layers=1)
    return with_tokenizer(checkpoints, model, byte_level(SIZES[0]))


@pytest.mark.slow
def test_drafts_of_another_tokenizer(checkpoints, check_drafts, target):
    model = checkpoints.target("llama", seed=3, vocab_size=SIZES[1], num_hidden_layers=1)
    tokenizer = sentence_piece(SIZES[1])
    files = with_tokenizer(checkpoints, model, tokenizer)
    texts = texts_of(byte_level(SIZES[0])), texts_of(tokenizer)
    both = set(texts[0].values()) & set(texts[1].values())
    assert any(" " in text for text in both) and 5 < len(both) < SIZES[1] - 3
    oracle = OracleModel(model.hf, texts, tokenizer.token_to_id("<unk>"))
    _, engine, _ = check_drafts(target, files.folder, "draft_model", oracle, least=20)
    assert len(engine.params.drafter.tokens.target_ids) == len(both)


def test_vocabularies_that_cannot_be_matched_are_refused(checkpoints, target):
    def refused(folder, *words):
        speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
        refusal(
            lambda: LLM(target.folder, speculative_config=speculation, verbose=False),
            folder,
            *words,
        )

    small = checkpoints.target("llama", seed=3, vocab_size=SIZES[1], num_hidden_layers=1)
    refused(small.folder, "vocab_size=20", "the target's 24", "no tokenizer.json to match")
    other = with_tokenizer(checkpoints, small, byte_level(SIZES[1], ["xyz", "zyx"])).folder
    for weights in other.glob("*.safetensors"):  # which it does not come to
        weights.write_bytes(b"")
    refused(other, "no token in common", target.folder)
    (other / "tokenizer.json").write_text('{"model": {"vocab": [1]}}')
    refused(other, "is not a tokenizer")
