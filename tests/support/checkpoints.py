"""Writes tiny random checkpoints, each once per test run.

No norm is 1 and no bias is 0, so that a dropped, swapped or misplaced tensor changes the logits.
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
    """Writes tiny random checkpoints. Calls with the same arguments return the same folder."""

    root: Path
    _made: dict[str, Any] = field(default_factory=dict)

    def target(
        self, kind: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **config: Any
    ) -> TargetFiles:
        """Return a target of model type `kind`, saved by transformers.

        `config` replaces fields of the small default config. For a model with a vision tower, these
        are fields of the text config.
        """
        return self._once(write_target, kind, seed, max_shard_size, config)

    def fused(self, target: TargetFiles) -> TargetFiles:
        """Return a copy of `target` where one tensor holds all experts of a layer, as published."""
        return self._once(write_fused, target)

    def mtp(
        self, target: TargetFiles, *, layout: str = "fused", is_beside: bool = False, count: int = 1
    ) -> HeadFiles:
        """Return a copy of `target` with `count` MTP modules.

        The modules are in the target's file, or in another file if `is_beside`. With the `layout`
        "fused", as in published files, one tensor holds all experts of a layer. With "single", each
        expert has separate tensors. The tensors in the result always have the layout "fused".
        """
        return self._once(write_mtp, target, layout, is_beside, count)

    def eagle(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """Return an EAGLE-1 head for `target`. For options, see `write_head`, `eagle_tensors`."""
        return self._once(write_head, eagle_tensors, target, options)

    def eagle3(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """Return an EAGLE-3 head for `target`. For options, see `write_head`, `eagle3_tensors`."""
        return self._once(write_head, eagle3_tensors, target, options)

    def p_eagle(self, target: TargetFiles, **options: Any) -> HeadFiles:
        """Return a P-EAGLE head for `target`. For options, see `write_head`, `p_eagle_tensors`."""
        return self._once(write_head, p_eagle_tensors, target, options)

    def copy(self, folder: Path, **edits: Any) -> Path:
        """Return a copy of a checkpoint folder.

        `edits` replace fields of its config.json. A field is removed if its new value is None.
        """
        made = self._folder()
        shutil.copytree(folder, made)
        config = json.loads((made / "config.json").read_text()) | edits
        config = {key: value for key, value in config.items() if value is not None}
        (made / "config.json").write_text(json.dumps(config))
        return made

    def with_letters(self, folder: Path, ids: Sequence[int] = range(96)) -> Path:
        """Return a copy of a checkpoint with a tokenizer whose tokens are single letters.

        `ids` are the token ids of the printable ASCII characters, then that of the end of sequence.
        """
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
