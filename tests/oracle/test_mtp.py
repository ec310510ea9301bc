"""MTP modules compared with transformers' modules: drafts at every round of every request.

conftest.py runs the engine. transformers builds the module like the target's last layer, so this
layer must have attention. In transformers, most models do not use the module by default.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from support.marks import marked
from support.targets import SIGMOID_KINDS

from specjax.device.cache import latent

torch = pytest.importorskip("torch")

VOCAB = 24  # small, so that an untrained module is right now and then
YARN = {
    **{"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "mscale_all_dim": 0.8},
    "original_max_position_embeddings": 32,
}
GROUPS = {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}
SINGLE = {"layout": "single"}
NOW_AND_THEN = (2, 0, 2, 0, 0, 0, 0)  # steps without drafts must still keep the caches true
# The model type, its config, the module's files, K in turn. With a rank of 128, chunks of 16 rows
# take fewer products in the plain form of attention.
CASES = {
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": False, "head_dim": 24}, SINGLE, (2,)),
    "qwen3_5-vision-tied-k-changes": (
        "qwen3_5",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "linear_num_value_heads": 6,
            "rms_norm_eps": 0.02,
        },
        {},
        (3, 0, 1, 0, 0, 0, 0),
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {"num_experts_per_tok": 3, "hidden_size": 48, "num_key_value_heads": 1},
        {},
        (2,),
    ),
    "deepseek_v3": ("deepseek_v3", {**GROUPS, "kv_lora_rank": 128}, SINGLE, NOW_AND_THEN),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        SINGLE,
        (2,),
    ),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True}, SINGLE, (2,)),
    "several": ("deepseek_v3", {}, SINGLE | {"count": 3}, (4, 0, 4, 0, 0, 0, 0)),
}


@pytest.fixture(autouse=True)
def only_products_count(monkeypatch):
    """Ignore memory traffic in the choice of attention's form: these models are too small."""
    monkeypatch.setattr(latent, "PRODUCTS_PER_NUMBER", 0)


@dataclass(frozen=True)
class OracleModules:
    """transformers' target and modules in turn. Each round starts at the first token."""

    hf: Any
    module: Any

    @property
    def keeps_last(self):
        return len(self.module.layers) == 1

    def fuse(self, final, entering):
        return final

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        """Module i reads the previous module's output of the row before, or zeros at the start.

        The last module continues with its own output.
        """
        from transformers.cache_utils import MtpCache

        committed, drafts, hidden = tokens[: length + 1], [], fused[:length]
        count, head = len(self.module.layers), self.hf.get_output_embeddings()
        for i in range(num_drafts):
            ids = torch.tensor([[*committed[1:], *drafts]])
            cache = MtpCache(config=self.hf.config.get_mtp_config())
            at = torch.arange(ids.shape[1])[None]
            (out,) = self.module.forward_layer(
                min(i, count - 1), hidden[None], at, cache, input_ids=ids
            )
            drafts.append(choose(head(out[-1]), [*committed, *drafts]))
            is_last = i + 1 >= count
            hidden = torch.cat([hidden, out[-1:]] if is_last else [0 * out[:1], out])
        return drafts


def load_oracle(folder, kind):
    """Return transformers' model and modules of a folder."""
    import transformers
    from transformers.modeling_layers import MtpModel

    is_whole = kind == "qwen3_5"
    auto = getattr(transformers, f"AutoModelFor{'ImageTextToText' if is_whole else 'CausalLM'}")
    config = transformers.AutoConfig.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if kind in SIGMOID_KINDS:
            # Their own pattern names the published model's module, and would report this one as
            # unexpected.
            first = config.num_hidden_layers
            pattern = rf"model\.layers\.[{first}-{first + 2}]\..*"
            cls = auto._model_mapping[type(config)]
            patch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [pattern])
        hf = auto.from_pretrained(folder, attn_implementation="eager").eval()
    text = hf.config.get_text_config()
    if kind == "glm4_moe_lite":  # its class does not read how many modules there are
        text.num_mtp_layers, text.mtp_mlp_layer_types = 1, ["sparse"]
    elif kind not in SIGMOID_KINDS:
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    return OracleModules(hf, MtpModel.from_pretrained(hf).eval())


def written(checkpoints, name):
    """Return the target with the module's files, and the oracle, of a case."""
    kind, config, options, _ = CASES[name]
    target = checkpoints.target(kind, vocab_size=VOCAB, **config)
    files = checkpoints.mtp(target, **options)
    return replace(target, folder=files.folder), load_oracle(files.folder, kind)


@pytest.mark.slow
def test_the_oracle_drafts_as_generation_does(checkpoints, monkeypatch):
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    _, oracle = written(checkpoints, "deepseek_v3")
    rounds, propose = [], MTPCandidateGenerator.get_candidates

    def record(*args, **kwargs):
        found = propose(*args, **kwargs)
        rounds.append((kwargs["input_ids"] if "input_ids" in kwargs else args[1], found[0]))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", record)
    prompt = torch.tensor([[1, 17, 9, 20, 3]])
    options = {"do_sample": False, "max_new_tokens": 16}
    out = oracle.hf.generate(prompt, use_mtp=True, **options)
    assert out.tolist() == oracle.hf.generate(prompt, **options).tolist()
    drafted = [one for one in rounds if one[1].shape != one[0].shape]
    with torch.no_grad():
        for known, candidates in drafted:
            hidden = oracle.hf.get_decoder()(input_ids=known[:, :-1]).last_hidden_state[0]
            tokens, length = known[0].tolist(), known.shape[1] - 1
            draft = oracle.drafts(hidden, tokens, length, 1, 1, lambda x, _: int(x.argmax()))
            assert draft == candidates[0, -1:].tolist()
    assert len(drafted) > 6


SLOW = "qwen3_5-vision-tied-k-changes", "deepseek_v3"


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CASES, fast=["glm4_moe_lite"], slow=SLOW))
def test_drafts(checkpoints, check_drafts, name):
    target, oracle = written(checkpoints, name)
    drafter, *_ = check_drafts(target, target.folder, "mtp", oracle, ks=CASES[name][-1])
    assert not drafter.head.has_embedding and drafter.aux_layers == ()
