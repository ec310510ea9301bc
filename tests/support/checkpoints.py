"""Tiny checkpoints with signal, written once a run.

No norm is 1 and no bias is 0, so that a tensor that is dropped, swapped or misplaced shows in the
logits.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.heads import eagle3_tensors, eagle_tensors, p_eagle_tensors, write_head
from support.targets import write_fused, write_mtp, write_target
from support.weights import HeadFiles, TargetFiles
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Checkpoints:
    """Writes tiny random checkpoints; the same arguments give the same folder."""

    root: Path
    _made: dict[str, Any] = field(default_factory=dict)

    def target(
        self, kind: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **config: Any
    ) -> TargetFiles:
        """A target of model type `kind` as transformers saves it, `config` over small defaults; one
        with a vision tower takes the config of its text part."""
        return self._once(write_target, kind, seed, max_shard_size, config)

    def fused(self, target: TargetFiles) -> TargetFiles:
        """A copy of `target` with the experts of a layer in one tensor, as they are published."""
        return self._once(write_fused, target)

    def mtp(
        self, target: TargetFiles, *, layout: str = "fused", is_beside: bool = False, count: int = 1
    ) -> HeadFiles:
        """A copy of `target` with MTP modules, in the same file or beside it.

        Experts are in the `layout` "fused" (as published, and as the result has them) or "single".
        """
        return self._once(write_mtp, target, layout, is_beside, count)

    def eagle(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """An EAGLE-1 head for `target`; options are those of `write_head` and `eagle_tensors`."""
        return self._once(write_head, eagle_tensors, target, options)

    def eagle3(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """An EAGLE-3 head for `target`, with the options of `eagle3_tensors`."""
        return self._once(write_head, eagle3_tensors, target, options)

    def p_eagle(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """A P-EAGLE head for `target`, with the options of `p_eagle_tensors`."""
        return self._once(write_head, p_eagle_tensors, target, options)

    def copy(self, folder: Path, **edits: Any) -> Path:
        """A copy of a checkpoint folder with `edits` to its config.json; None removes a field."""
        made = self._folder()
        shutil.copytree(folder, made)
        config = json.loads((made / "config.json").read_text()) | edits
        config = {key: value for key, value in config.items() if value is not None}
        (made / "config.json").write_text(json.dumps(config))
        return made

    def with_letters(self, folder: Path, ids: Sequence[int] = range(96)) -> Path:
        """A copy of a checkpoint with a tokenizer: `ids` are of printable ASCII, then of an end."""
        made = self.copy(folder)
        letters = ["Ġ", *map(chr, range(33, 127))]
        vocab = dict(zip([*letters[: len(ids) - 1], "</s>"], ids, strict=True))
        tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
        tokenizer.save(str(made / "tokenizer.json"))
        return made

    def _once(self, write: Any, *arguments: Any) -> Any:
        key = repr((write, arguments))
        if key not in self._made:
            self._made[key] = write(self._folder(), *arguments)
        return self._made[key]

    def _folder(self) -> Path:
        return self.root / str(sum(1 for _ in self.root.iterdir()))
