"""Methods of transformers' tokenizers for `ChatTokenizer`, such as `__call__` and `get_vocab`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

_NO_EFFECT = (None, False, "do_not_pad", "do_not_truncate")


class Encoding(dict):
    """Token ids of one or several texts: a mapping whose keys are also attributes."""

    @property
    def input_ids(self) -> Any:
        """The token ids of a text, or a list of the token ids of each text."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A 1 for each token id, in the same lists as `input_ids`."""
        return self["attention_mask"]


class TokenizerNames:
    """The base class of `ChatTokenizer`, with methods and attributes of transformers' tokenizers.

    These methods use the subclass's `tokenizer`, `special_tokens`, `encode` and `decode`.
    """

    if TYPE_CHECKING:
        tokenizer: Tokenizer
        special_tokens: Mapping[str, Any]

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
        def decode(self, token_ids: Sequence[int]) -> str: ...

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any
    ) -> Encoding:
        """Return the "input_ids" and "attention_mask" of a text.

        For several texts, both values are lists with one list per text.

        Raises:
            ValueError: an option would change the result, like padding or return_tensors.
        """
        for name, value in options.items():
            if name != "return_attention_mask" and value not in _NO_EFFECT:
                raise ValueError(
                    f"{name}={value!r} is not supported: ids are lists without padding; "
                    "leave it out, or use transformers.AutoTokenizer"
                )
        texts = [text] if isinstance(text, str) else list(text)
        if bad := [one for one in texts if not isinstance(one, str)]:
            raise ValueError(f"text has {bad[0]!r}, which is not a text")
        ids = [self.encode(one, add_special_tokens=add_special_tokens) for one in texts]
        masks = [[1] * len(one) for one in ids]
        if isinstance(text, str):
            return Encoding(input_ids=ids[0], attention_mask=masks[0])
        return Encoding(input_ids=ids, attention_mask=masks)

    def __len__(self) -> int:
        """Return the number of tokens, including added tokens."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without added tokens."""
        return self.tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Return a mapping from the names of all tokens to their ids."""
        return self.tokenizer.get_vocab(with_added_tokens=True)

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens with a special role, like "eos_token"."""
        named = (t for t in self.special_tokens.values() if isinstance(t, str))
        return list(dict.fromkeys(named))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of `all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or a list of ids for several. Unknown tokens give None."""
        if isinstance(tokens, str):
            return self.tokenizer.token_to_id(tokens)
        return [self.tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the token of an id, or a list of the tokens of several ids."""
        if isinstance(ids, Iterable):
            return [self.tokenizer.id_to_token(int(token)) for token in ids]
        return self.tokenizer.id_to_token(int(ids))

    def batch_decode(self, sequences: Iterable[Sequence[int]], **options: Any) -> list[str]:
        """Return the text of each list of token ids. `options` are passed to `decode`."""
        return [self.decode(ids, **options) for ids in sequences]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return `eos_token`, `eos_token_id` or the like; None if there is no such token."""
            kind = name.removesuffix("_id")
            if name.startswith("_") or not kind.endswith("_token"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            token = self.special_tokens.get(kind)
            if name == kind or token is None:
                return token
            return self.tokenizer.token_to_id(token)
