"""What the tests share: JAX on the CPU with a compilation cache, and tiny checkpoints with signal.

The checkpoints have random weights in which every tensor matters (no norm is 1, no bias is 0), so
that one that is dropped, swapped or misplaced shows in the logits. They are built once a run.
"""

import gc
import json
import math
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest
from jax._src import compiler
from jax._src.lru_cache import LRUCache
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specjax.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS, SamplingParams

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

VOCAB = 96
COMPILED = "/jax/core/compile/backend_compile_duration"
PLAIN_OPTIONS = compiler.get_compile_options


def put_whole(cache: LRUCache, key: str, program: bytes) -> None:
    """What JAX's cache of compiled programs does, but other processes see an entry whole or not."""
    part = cache.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
    part.write_bytes(program)
    os.replace(part, cache.path / f"{key}-cache")


LRUCache.put = put_whole


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Let go of a module's programs: each takes memory maps, of which a process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@dataclass(frozen=True)
class TargetFiles:
    """A target's folder, and the transformers model that wrote it (fp32, in evaluation mode)."""

    folder: Path
    hf: Any


@dataclass(frozen=True)
class HeadFiles:
    """A drafter's folder, and what is in it: tensors by published name, and the config."""

    folder: Path
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoints:
    """Writes tiny random checkpoints; the same arguments give the same folder."""

    root: Path
    _made: dict[str, Any] = field(default_factory=dict)

    def target(
        self, kind: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **config: Any
    ) -> TargetFiles:
        """A target of model type `kind` as transformers saves it, `config` over small defaults.

        Those with a vision tower take the config of their text part.
        """
        return self._once(_write_target, kind, seed, max_shard_size, config)

    def fused(self, target: TargetFiles) -> TargetFiles:
        """A copy of `target` with the experts of a layer in one tensor, as they are published."""
        return self._once(_write_fused, target)

    def mtp(
        self,
        target: TargetFiles,
        *,
        seed: int = 1,
        layout: str = "fused",
        is_beside: bool = False,
    ) -> HeadFiles:
        """A copy of `target` with an MTP module, in the same file or beside it.

        Experts are in the `layout` "fused" (as published, and as the result has them) or "single".
        """
        return self._once(_write_mtp, target, seed, layout, is_beside)

    def eagle(
        self, target: TargetFiles, *, seed: int = 1, file: str = "model.safetensors", **options: Any
    ) -> HeadFiles:
        """An EAGLE-1 head for `target`; see `_eagle_tensors` for the options."""
        return self._once(_write_head, _eagle_tensors, target, seed, file, options)

    def eagle3(
        self, target: TargetFiles, *, seed: int = 1, file: str = "model.safetensors", **options: Any
    ) -> HeadFiles:
        """An EAGLE-3 head for `target`; see `_eagle3_tensors` for the options."""
        return self._once(_write_head, _eagle3_tensors, target, seed, file, options)

    def copy(self, folder: Path, **edits: Any) -> Path:
        """A copy of a checkpoint folder with `edits` to its config.json; None removes a field."""
        made = self._folder()
        shutil.copytree(folder, made)
        config = json.loads((made / "config.json").read_text()) | edits
        config = {key: value for key, value in config.items() if value is not None}
        (made / "config.json").write_text(json.dumps(config))
        return made

    def with_letters(self, folder: Path) -> Path:
        """A copy of a checkpoint of 96 tokens with a tokenizer: printable ASCII, then an end."""
        made = self.copy(folder)
        letters = ["Ġ", *map(chr, range(33, 127))]
        vocab = {letter: i for i, letter in enumerate([*letters, "</s>"])}
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


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    """Tiny checkpoints, written when first asked for; tests that need them need transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@dataclass
class CompilationLog:
    """Every compilation of this process, those that a cache answered included."""

    names: list[str] = field(default_factory=list)

    @contextmanager
    def none_expected(self) -> Iterator[None]:
        """Fail if anything compiles inside the block."""
        before = len(self.names)
        yield
        assert not self.names[before:]


@pytest.fixture(scope="session")
def compilations() -> CompilationLog:
    """What JAX compiled since the fixture was first asked for."""
    log = CompilationLog()

    def listen(event: str, _: float, **details: Any) -> None:
        if event == COMPILED:
            log.names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return log


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Programs of a module compile in a fraction of the time, and run slowly.

    Until JAX 0.11, XLA may also do without its fusion emitters, which make most of the code. JAX's
    config does not have the option, and XLA_FLAGS would set it for the other modules as well.
    """

    def quick_options(*args: Any, **kwargs: Any) -> Any:
        options = PLAIN_OPTIONS(*args, **kwargs)
        options.env_option_overrides += [("xla_cpu_use_fusion_emitters", False)]
        return options

    with pytest.MonkeyPatch.context() as patch:
        if jax.__version_info__ < (0, 11):
            patch.setattr(compiler, "get_compile_options", quick_options)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def full_compilation(quick_compilation: None) -> Iterator[None]:
    """For a test of bits in a module that compiles quickly: its programs are those of users."""
    jax.clear_caches()  # of what was compiled quickly
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", PLAIN_OPTIONS)
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def ragged_prompts():
    """Prompts of given lengths, random token ids; the second token is the prompt's index."""

    def make(*lengths: int, vocab_size: int = VOCAB, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
        for i, prompt in enumerate(prompts):
            prompt[1:2] = [i] if len(prompt) > 1 else []
        return prompts

    return make


@dataclass(frozen=True)
class Asked:
    """What a request asks of its logits and the tokens it has: an oracle of loops and float64.

    Ids stand where a user gives texts, `processor` for the number of the logits processors.
    """

    params: SamplingParams = SamplingParams()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    stop_ids: Sequence[int] = ()
    processor: int = -1

    def then(self, *tokens: int) -> "Asked":
        """The same request, `tokens` later."""
        return replace(self, output=[*self.output, *tokens])

    def edit(
        self,
        logits: Sequence[float],
        twins: Mapping[int, Sequence[Callable]] | None = None,
        allowed: Any = None,
    ) -> list[float]:
        """Logits as they are to be drawn from, temperature and truncation apart.

        `twins` by number do in Python (tokens, logits) what logits processors do; `allowed` are the
        ids that a grammar permits.
        """
        tokens, counts = [*self.prompt, *self.output], Counter(self.output)
        repetition, presence, frequency = map(
            float32,
            (
                self.params.repetition_penalty,
                self.params.presence_penalty,
                self.params.frequency_penalty,
            ),
        )
        edited = [float(x) for x in logits]
        for token in set(tokens):
            x = edited[token]
            x = x / repetition if x > 0 else x * repetition
            edited[token] = x - frequency * counts[token] - presence * (counts[token] > 0)
        for *start, end in self.bad_words:
            if len(start) <= len(tokens) and tokens[len(tokens) - len(start) :] == start:
                edited[end] = -math.inf
        for token, bias in self.params.logit_bias.items():
            edited[token] += float32(bias)
        permitted = self.params.allowed_token_ids
        for token in range(len(edited)):
            if permitted is not None and token not in permitted:
                edited[token] = -math.inf
        if len(self.output) < self.params.min_tokens:
            for token in self.stop_ids:
                edited[token] = -math.inf
        for twin in (twins or {}).get(self.processor, ()):
            edited = twin(tokens, edited)
        return [x if allowed is None or i in allowed else -math.inf for i, x in enumerate(edited)]

    def kept(self, edited: Sequence[float]) -> list[bool]:
        """Which of edited logits min_p, then top_k, then top_p leave."""
        if self.params.temperature == 0:
            return [True] * len(edited)
        left = np.exp((np.array(edited) - max(edited)) / float32(self.params.temperature))
        left[left < float32(self.params.min_p) * left.max()] = 0
        ranked = sorted(left, reverse=True)
        if 0 < self.params.top_k < len(left):
            left[left < ranked[self.params.top_k - 1]] = 0
        if self.params.top_p < 1:
            ranked = np.array(sorted(left / left.sum(), reverse=True))
            last = np.argmax(np.cumsum(ranked) >= float32(self.params.top_p))
            left[left / left.sum() < ranked[last]] = 0
        return (left > 0).tolist()

    def probs(self, logits: Sequence[float]) -> np.ndarray:
        """The distribution of the token that follows."""
        edited = np.array(self.edit(logits))
        if self.params.temperature == 0:
            return np.eye(len(edited))[edited.argmax()]
        weights = np.exp((edited - edited.max()) / float32(self.params.temperature))
        weights *= self.kept(edited.tolist())
        return weights / weights.sum()

    @classmethod
    def random(cls, rng: np.random.Generator, vocab_size: int, drafts: Sequence[int]) -> "Asked":
        """Any mix of features; bad words often match. Token 0 is never ruled out."""

        def some(*values):
            return values[rng.integers(len(values))]

        def ids(most):
            return (1 + rng.permutation(vocab_size - 1)[: rng.integers(most + 1)]).tolist()

        def word(text):
            end, size = rng.integers(len(text) + 1), rng.integers(MAX_BAD_WORD_TOKENS)
            return [*text[max(end - size, 0) : end], *(ids(1) or [1])]

        prompt, output = (rng.integers(0, min(vocab_size, 9), n).tolist() for n in (some(1, 9), 6))
        output = output[: rng.integers(7)]
        if rng.random() < 0.15:
            return cls(SamplingParams(temperature=some(0, 1)), prompt, output)
        return cls(
            SamplingParams(
                temperature=some(0.0, 0.3, 1.0, 2.5),
                top_k=int(some(0, -1, 1, 3, vocab_size, vocab_size + 5)),
                top_p=some(1.0, 1e-9, 0.3, 0.9, 0.999),
                min_p=some(0.0, 0.0, 0.01, 0.3, 1.0),
                repetition_penalty=some(1.0, 1.3, 0.7),
                presence_penalty=some(0.0, 0.5, -1.0),
                frequency_penalty=some(0.0, 0.3, -0.6),
                logit_bias={i: float(rng.normal() * 4) for i in ids(min(vocab_size - 1, 8))},
                allowed_token_ids=some(None, None, [0, *ids(vocab_size - 1)]),
                min_tokens=int(rng.integers(len(output) + len(drafts) + 2)),
                max_tokens=None,
            ),
            prompt,
            output,
            bad_words=[word([*prompt, *output, *drafts]) for _ in range(some(0, 5, 32))],
            stop_ids=ids(min(vocab_size - 1, MAX_STOP_IDS)),
            processor=some(-1, 0, 2),
        )

    @staticmethod
    def on_device(asked: Sequence["Asked"], vocab_size: int, *, max_logit_bias: int = 8) -> Any:
        """`Requests` that ask for the same, seeds 0, 1, ...; what is unused holds garbage."""
        from specjax.device.requests import Edits, Requests, Sampling

        def column(values, dtype=np.float32):
            return jax.numpy.array(np.array(list(values)).astype(dtype))

        def table(rows, width, fill, dtype=np.int32):
            return column([[*row, *[fill] * (width - len(row))] for row in rows], dtype)

        def padded(words):
            unused = [()] * (MAX_BAD_WORDS - len(words))
            return [
                i for w in [*words, *unused] for i in [*[-1] * MAX_BAD_WORD_TOKENS, *w][len(w) :]
            ]

        def bits(ids):
            chosen = range(vocab_size) if ids is None else ids
            words = [sum(1 << i % 32 for i in chosen if i // 32 == w) for w in range(num_words)]
            return np.array(words, np.uint32).view(np.int32)

        num_words = -(-vocab_size // 32)
        params = [one.params for one in asked]
        sampling = Sampling(
            temperature=column(p.temperature for p in params),
            seeds=column(range(len(asked)), np.uint32),
            top_k=column((max(p.top_k, 0) for p in params), np.int32),
            top_p=column(p.top_p for p in params),
            min_p=column(p.min_p for p in params),
        )
        edits = Edits(
            repetition=column(p.repetition_penalty for p in params),
            presence=column(p.presence_penalty for p in params),
            frequency=column(p.frequency_penalty for p in params),
            min_tokens=column((p.min_tokens for p in params), np.int32),
            bias_ids=table([list(p.logit_bias) for p in params], max_logit_bias, -1),
            bias=table(
                [list(p.logit_bias.values()) for p in params], max_logit_bias, math.nan, np.float32
            ),
            bad_words=column((padded(one.bad_words) for one in asked), np.int32),
            allowed=column((bits(p.allowed_token_ids) for p in params), np.int32),
            processor=column((one.processor for one in asked), np.int32),
        )
        return Requests(
            prompt_lengths=column((len(one.prompt) for one in asked), np.int32),
            limits=column([2**30] * len(asked), np.int32),
            stop_ids=table([one.stop_ids for one in asked], MAX_STOP_IDS, -1),
            sampling=sampling,
            edits=edits,
        )


def float32(x: float) -> float:
    """What is left of x on the device."""
    return float(np.float32(x))


@pytest.fixture(scope="session")
def asked() -> type[Asked]:
    """Requests that know what the device should make of them."""
    return Asked


def randomise(tensors: Mapping[str, Any], seed: int, plain_norms: str = "norm") -> None:
    """Fill torch tensors in place: matrices keep the scale of what they multiply.

    Norms whose names hold `plain_norms` are near one, others near zero.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):  # decays slow enough for states that last
                tensor.copy_((noise.abs() + 0.05).log())
            elif name.endswith("dt_bias"):
                tensor.copy_(0.5 * noise - 2)
            elif tensor.ndim > 1:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
            else:
                tensor.copy_(0.3 * noise + (1.0 if plain_norms in name else 0.0))


HYBRID_SIZES = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
}
MOE_SIZES = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
VISION_SIZES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


@pytest.fixture(scope="session")
def rewrite_tensors() -> Callable[..., None]:
    """See `rewrite`."""
    return rewrite


def _hf_config(kind: str, given: Mapping[str, Any]) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if _is_hybrid(kind):
        sizes |= HYBRID_SIZES
    if "moe" in kind or kind == "qwen3_next":
        sizes |= MOE_SIZES
    config = sizes | given
    if not _has_vision(kind):
        return transformers.AutoConfig.for_model(kind, **config)
    return transformers.AutoConfig.for_model(
        kind,
        text_config=config,
        vision_config=VISION_SIZES | {"out_hidden_size": config["hidden_size"]},
        tie_word_embeddings=config["tie_word_embeddings"],
    )


def _is_hybrid(kind: str) -> bool:
    return kind == "qwen3_next" or kind.startswith("qwen3_5")


def _has_vision(kind: str) -> bool:
    return kind in ("qwen3_5", "qwen3_5_moe")


def _write_target(
    folder: Path, kind: str, seed: int, max_shard_size: str, config: Mapping[str, Any]
) -> TargetFiles:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    hf_config = _hf_config(kind, config)
    hf_config._attn_implementation = "eager"
    auto = (
        transformers.AutoModelForImageTextToText
        if _has_vision(kind)
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(hf_config, dtype=torch.float32).eval()
    # The norm of a recurrent layer's output is a plain one.
    plain_norms = "linear_attn.norm" if _is_hybrid(kind) else "norm"
    randomise(dict(model.named_parameters()), seed, plain_norms)
    model.generation_config.eos_token_id = hf_config.get_text_config().eos_token_id
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return TargetFiles(folder, model)


def _write_fused(folder: Path, target: TargetFiles) -> TargetFiles:
    import torch

    def fuse(tensors):
        fused, found = {}, {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
            if match:
                found.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
            else:
                fused[name] = tensor
        for prefix, one in found.items():
            numbers = sorted({number for number, _ in one})
            pairs = [torch.cat([one[i, "gate"], one[i, "up"]]) for i in numbers]
            fused[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
            fused[f"{prefix}.down_proj"] = torch.stack([one[i, "down"] for i in numbers])
        return fused

    shutil.copytree(target.folder, folder)
    rewrite(folder / "model.safetensors", fuse)
    return TargetFiles(folder, target.hf)


def _write_mtp(
    folder: Path, target: TargetFiles, seed: int, layout: str, is_beside: bool
) -> HeadFiles:
    import safetensors.torch
    import torch

    assert layout in ("fused", "single")
    hf, dim = target.hf.config.get_text_config(), target.hf.config.get_text_config().hidden_size
    attention = max(i for i, kind in enumerate(hf.layer_types) if kind == "full_attention")
    layer = target.hf.get_decoder().layers[attention]
    tensors = {f"mtp.layers.0.{n}": torch.empty_like(x) for n, x in layer.state_dict().items()}
    tensors["mtp.fc.weight"] = torch.empty(dim, 2 * dim)
    for norm in "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden":
        tensors[f"mtp.{norm}.weight"] = torch.empty(dim)
    randomise(tensors, seed, plain_norms="none")

    shutil.copytree(target.folder, folder)
    written = _unfused(tensors) if layout == "single" else tensors
    if is_beside:
        safetensors.torch.save_file(written, folder / "mtp.safetensors")
    else:
        rewrite(folder / "model.safetensors", lambda old: old | written)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return HeadFiles(folder, tensors, config.get("text_config", config))


def _unfused(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors with a name for each expert's own."""
    single = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            single[name] = tensor
            continue
        for i, one in enumerate(tensor):
            parts = (one,) if last == "down_proj" else one.chunk(2)
            names = ("down",) if last == "down_proj" else ("gate", "up")
            for part, of in zip(parts, names, strict=True):
                single[f"{prefix}.{i}.{of}_proj.weight"] = part.clone()
    return single


def rewrite(path: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace the tensors of a safetensors file by what `change` makes of them."""
    import safetensors.torch

    tensors = change(safetensors.torch.load_file(path))
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})


def _write_head(
    folder: Path,
    make: Any,
    target: TargetFiles,
    seed: int,
    file: str,
    options: Mapping[str, Any],
) -> HeadFiles:
    import safetensors.torch
    import torch

    tensors, config = make(target, **options)
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    randomise({n: x for n, x in floats.items() if n != "embed_tokens.weight"}, seed)
    folder.mkdir()
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        safetensors.torch.save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return HeadFiles(folder, tensors, config)


def _eagle_tensors(
    target: TargetFiles,
    *,
    fc_bias: bool = False,
    embedding: str | None = None,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """EAGLE-1 as published. `embedding` is None, "same" as the target's, or "own"."""
    import torch

    config = _decoder_config(target) | config
    dim = config["hidden_size"]
    tensors = {
        "fc.weight": torch.empty(dim, 2 * dim),
        **_decoder_layer(config, "layers.0", dim),
        **_embedding(target, embedding, dim),
    }
    if fc_bias:
        tensors["fc.bias"] = torch.empty(dim)
    return tensors, config


def _eagle3_tensors(
    target: TargetFiles,
    *,
    layout: str = "raw",
    draft_vocab: int | None = None,
    num_aux: int = 3,
    input_norm: bool = False,
    fc_norm: bool = False,
    embedding: str | None = None,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """EAGLE-3 in the `layout` "raw" (midlayer.*) or "speculators" (layers.0.*, nested config)."""
    import torch

    decoder = _decoder_config(target)
    decoder |= {key: config.pop(key) for key in decoder.keys() & config.keys()}
    vocab, wide = decoder["vocab_size"], target.hf.config.hidden_size
    if target.hf.config.num_hidden_layers < 3:  # too few for the default ones
        config = {"eagle_aux_hidden_state_layer_ids": list(range(num_aux))} | config
    dim = decoder["hidden_size"]
    layer = "midlayer" if layout == "raw" else "layers.0"
    tensors = {
        "fc.weight": torch.empty(dim, num_aux * wide),
        **_decoder_layer(decoder, layer, 2 * dim),
        f"{layer}.input_layernorm.weight": torch.empty(dim),
        f"{layer}.hidden_norm.weight": torch.empty(dim),
        "norm.weight": torch.empty(dim),
        "lm_head.weight": torch.empty(draft_vocab or vocab, dim),
        **_embedding(target, embedding, dim),
    }
    if input_norm:
        tensors["input_norm.weight"] = torch.empty(num_aux * wide)
    for i in range(num_aux if fc_norm else 0):
        tensors[f"fc_norm.{i}.weight"] = torch.empty(wide)
    if draft_vocab:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[:draft_vocab]
        kept = kept.sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
        config["draft_vocab_size"] = draft_vocab
    if layout == "raw":
        return tensors, decoder | config
    return tensors, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": decoder,
        **config,
    }


def _decoder_config(target: TargetFiles) -> dict[str, Any]:
    hf = target.hf.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _decoder_layer(config: Mapping[str, Any], layer: str, num_in: int) -> dict[str, Any]:
    import torch

    dim, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{layer}.self_attn.q_proj.weight": torch.empty(queries, num_in),
        f"{layer}.self_attn.k_proj.weight": torch.empty(keys, num_in),
        f"{layer}.self_attn.v_proj.weight": torch.empty(keys, num_in),
        f"{layer}.self_attn.o_proj.weight": torch.empty(dim, queries),
        f"{layer}.post_attention_layernorm.weight": torch.empty(dim),
        f"{layer}.mlp.gate_proj.weight": torch.empty(inner, dim),
        f"{layer}.mlp.up_proj.weight": torch.empty(inner, dim),
        f"{layer}.mlp.down_proj.weight": torch.empty(dim, inner),
    }


def _embedding(target: TargetFiles, kind: str | None, dim: int) -> dict[str, Any]:
    import torch

    if kind is None:
        return {}
    if kind == "same":
        weight = target.hf.get_input_embeddings().weight.detach().clone()
    else:
        generator = torch.Generator().manual_seed(9)
        weight = torch.randn(target.hf.config.vocab_size, dim, generator=generator)
    return {"embed_tokens.weight": weight}
