"""Maps tokens of one checkpoint to tokens of another checkpoint that have the same text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint.config_json import read_json
from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.tokenizer_files import read_tokenizer

SPACES = "▁", "Ġ"  # how sentencepiece and byte-level tokenizers write a space


@dataclass(frozen=True)
class TokenTexts:
    """The texts of a tokenizer's tokens, by id."""

    texts: Mapping[int, str]  # the tokens' texts by id, with plain spaces
    unknown: int  # the id for texts that have no token; see `read_texts`

    def below(self, vocab_size: int) -> Mapping[str, int]:
        """Return a mapping from each text to its lowest id below `vocab_size`.

        Larger ids have no logits in a model with this vocabulary size.
        """
        ids = sorted((id for id in self.texts if id < vocab_size), reverse=True)
        return {self.texts[id]: id for id in ids}


class TokenMap(NamedTuple):
    """A map from a target's tokens to the tokens of a drafter with another vocabulary."""

    target_ids: Any  # i32[I], the target's ids of the texts that both vocabularies have
    draft_ids: Any  # i32[I], the drafter's ids of the same texts
    from_target: Any  # i32[V], the drafter's id for each target id, or the drafter's unknown id


def read_texts(folder: Path) -> TokenTexts | None:
    """Return the token texts of a checkpoint folder; None if the folder has no tokenizer.json.

    `TokenTexts.unknown` is the id of the tokenizer's unknown token. If there is no unknown token,
    it is the config's first `eos_token_id`, or 0 if the config has none.

    Raises:
        CheckpointError: a file cannot be read.
    """
    stored = read_tokenizer(folder)
    if stored is None:
        return None
    ids = stored.tokenizer.get_vocab(with_added_tokens=True)
    texts = {id: _with_spaces(text) for text, id in ids.items()}
    model = read_json(folder, "tokenizer.json")["model"]
    unknown = model.get("unk_id", ids.get(model.get("unk_token") or ""))
    if unknown is None:
        ends = read_json(folder, "config.json").get("eos_token_id")
        unknown = ends[0] if isinstance(ends, list) and ends else ends
    return TokenTexts(texts, unknown if isinstance(unknown, int) else 0)


def match(folders: tuple[Path, Path], sizes: tuple[int, int]) -> TokenMap | None:
    """Return the map from a target's tokens to a drafter's tokens.

    Return None if every id means the same token in both vocabularies. This is assumed if the sizes
    are equal, and the tokenizers are equal or a tokenizer is missing.

    Args:
        folders: the checkpoint folders of the target and the drafter.
        sizes: the vocabulary sizes of the target and the drafter.

    Raises:
        CheckpointError: there is no common token, or sizes differ and a tokenizer is missing.
    """
    target, drafter = map(read_texts, folders)
    if target is None or drafter is None:
        if sizes[0] == sizes[1]:
            return None
        lacks = folders[0] if target is None else folders[1]
        raise CheckpointError(
            f"{folders[1]}: vocab_size={sizes[1]} differs from the target's {sizes[0]}, and "
            f"{lacks} has no tokenizer.json to match their tokens; add it, or use a draft model "
            "with the target's tokenizer"
        )
    if sizes[0] == sizes[1] and target.texts == drafter.texts:
        return None
    ours, theirs = target.below(sizes[0]), drafter.below(sizes[1])
    pairs = sorted((ours[text], theirs[text]) for text in ours.keys() & theirs.keys())
    if not pairs:
        raise CheckpointError(
            f"{folders[1]}: its tokenizer has no token in common with the tokenizer of "
            f"{folders[0]}; use a draft model with a vocabulary like the target's"
        )
    from_target = np.full(sizes[0], min(drafter.unknown, sizes[1] - 1), np.int32)
    for id, text in target.texts.items():
        if id < sizes[0] and text in theirs:
            from_target[id] = theirs[text]
    target_ids, draft_ids = np.array(pairs, np.int32).T
    return TokenMap(target_ids, draft_ids, from_target)


def _with_spaces(text: str) -> str:
    for mark in SPACES:
        text = text.replace(mark, " ")
    return text
