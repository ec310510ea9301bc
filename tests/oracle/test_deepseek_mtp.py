"""MTP modules of DeepSeek-V3 and GLM-4.7-Flash against those of transformers.

The engine's requests run at temperatures 0 and 1, with preemption; every draft is compared with
what transformers' module makes of its own hidden states, and every token with the target's choice.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from specjax import LLM, SamplingParams
from specjax.checkpoint.errors import CheckpointError
from specjax.device.cache import latent

torch = pytest.importorskip("torch")

VOCAB = 24  # small, so that an untrained module is right now and then
YARN = {
    **{"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "mscale_all_dim": 0.8},
    "original_max_position_embeddings": 32,
}
GROUPS = {"n_group": 4, "topk_group": 2, "rope_parameters": YARN}
# By the name of a case: the model type, its config, the number of modules. With a rank of 128,
# chunks of 16 rows take fewer products in the plain form of attention.
CASES = {
    "deepseek_v3": ("deepseek_v3", {**GROUPS, "kv_lora_rank": 128}, 1),
    "glm4_moe_lite": ("glm4_moe_lite", {"num_attention_heads": 3, "num_key_value_heads": 3}, 1),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True}, 1),
    "several": ("deepseek_v3", {}, 3),
}


@pytest.fixture(autouse=True)
def only_products_count(monkeypatch):
    """What the plain form moves would not pay for models as small as these."""
    monkeypatch.setattr(latent, "PRODUCTS_PER_NUMBER", 0)


@dataclass(frozen=True)
class OracleModules:
    """transformers' target and modules in turn; a round is run from its first token."""

    hf: Any
    module: Any

    def fuse(self, final, entering):
        return final

    def drafts(self, fused, tokens, length, k, num_drafts, choose):
        """Module i takes what the one before put out a row earlier, and zero where there is none;
        the last one goes on with its own output."""
        from transformers.cache_utils import MtpCache

        committed, drafts = tokens[: length + 1], []
        embedding, count = self.hf.get_input_embeddings().weight.detach(), len(self.module.layers)
        hidden = fused[:length]
        for i in range(num_drafts):
            embedded = embedding[torch.tensor([*committed[1:], *drafts])][None]
            positions = torch.arange(embedded.shape[1])[None]
            cache = MtpCache(config=self.hf.config.get_mtp_config())
            number = min(i, count - 1)
            out = self.module.forward_layer(
                number, hidden[None], positions, cache, inputs_embeds=embedded
            )[0]
            drafts.append(choose(self.hf.get_output_embeddings()(out[-1]), [*committed, *drafts]))
            last = i + 1 >= count
            hidden = torch.cat([hidden, out[-1:]] if last else [torch.zeros(1, len(out[0])), out])
        return drafts


@dataclass(frozen=True)
class OracleModule:
    """transformers' target and module, over all rows at once."""

    hf: Any
    module: Any

    @property
    def embedding(self):
        return self.hf.get_input_embeddings().weight.detach()

    def fuse(self, final, entering):
        return final

    def run(self, embedded, hidden):
        from transformers.cache_utils import MtpCache

        positions = torch.arange(len(embedded))[None]
        cache = MtpCache(config=self.hf.config.get_mtp_config())
        return self.module.forward_layer(
            0, hidden[None], positions, cache, inputs_embeds=embedded[None]
        )[0]

    def recycled(self, y):
        return y  # after the module's last norm

    def logits(self, y):
        return self.hf.get_output_embeddings()(y)


def load_oracle(folder, kind):
    """transformers' model and module of a folder."""
    import transformers
    from transformers.modeling_layers import MtpModel

    auto = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = auto._model_mapping[type(config)]
    # Its own pattern names the published model's module, and would report this one as unexpected.
    last = config.num_hidden_layers + 2
    pattern = rf"model\.layers\.[{config.num_hidden_layers}-{last}]\..*"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [pattern])
        hf = auto.from_pretrained(folder, attn_implementation="eager").eval()
    if kind == "glm4_moe_lite":  # its class does not read how many modules there are
        hf.config.num_mtp_layers, hf.config.mtp_mlp_layer_types = 1, ["sparse"]
    module = MtpModel.from_pretrained(hf).eval()
    return (OracleModules if len(module.layers) > 1 else OracleModule)(hf, module)


@pytest.fixture(scope="module", params=CASES)
def case(request, checkpoints):
    """(target with the module's files, these files, the oracle)."""
    kind, config, count = CASES[request.param]
    target = checkpoints.target(kind, vocab_size=VOCAB, **config)
    files = checkpoints.mtp(target, layout="single", count=count)
    return replace(target, folder=files.folder), files, load_oracle(files.folder, kind)


@pytest.mark.slow
def test_the_oracle_drafts_as_generation_does(case, monkeypatch):
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    *_, oracle = case
    if isinstance(oracle, OracleModules):
        pytest.skip("its modules have no rows before the first that is theirs")
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
    num_drafts = 0
    with torch.no_grad():
        for known, candidates in rounds:
            if candidates.shape == known.shape:
                continue
            hidden = oracle.hf.get_decoder()(input_ids=known[:, :-1]).last_hidden_state[0]
            y = oracle.run(oracle.embedding[known[0, 1:]], hidden)[-1]
            assert int(oracle.logits(y).argmax()) == candidates[0, -1]
            num_drafts += 1
    assert num_drafts > 6


@pytest.mark.slow
def test_drafts(case, check_drafts):
    target, files, oracle = case
    k = 4 if isinstance(oracle, OracleModules) else 2
    drafter, _ = check_drafts(target, files, "mtp", oracle, ks=(k, 0, k, 0, 0, 0, 0))
    assert not drafter.head.has_embedding and drafter.aux_layers == ()


def generated(folder, prompts, num_pages, speculation):
    """(output tokens by request, the number of preemptions), every other request at 0.8."""
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40)
        for i in range(len(prompts))
    ]
    with LLM(
        folder,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        num_pages=num_pages,
        decode_batches=(2,),
        prefill_shapes=((2, 16),),
        speculative_config=speculation,
        compile_ahead=True,
        verbose=False,
    ) as llm:
        outputs = llm.generate(prompts, params, False)
        metrics = llm.metrics()
    assert speculation is None or metrics.num_accepted_tokens > 5
    return [one.outputs[0].token_ids for one in outputs], metrics.num_preemptions


@pytest.mark.slow
def test_drafts_and_preemption_change_no_token(checkpoints, ragged_prompts):
    target = checkpoints.target("deepseek_v3", vocab_size=VOCAB, **CASES["deepseek_v3"][1])
    folder = checkpoints.mtp(target, layout="single").folder
    prompts = ragged_prompts(3, 20, 1, 9, vocab_size=VOCAB)
    expected, num_preemptions = generated(folder, prompts, None, None)
    assert num_preemptions == 0
    for method in "mtp", "ngram":
        speculation = {"method": method, "num_speculative_tokens": 2}
        found, num_preemptions = generated(folder, prompts, 5, speculation)
        assert found == expected
        assert num_preemptions > 0


@pytest.mark.parametrize(
    "num_modules, lost",
    [(0, "no tensor model.layers.2.eh_proj.weight"), (1, "missing: model.layers.3.")],
)
def test_modules_that_are_not_there(checkpoints, num_modules, lost):
    """Of two that the config tells of."""
    target = checkpoints.target("deepseek_v3", vocab_size=VOCAB)
    files = checkpoints.mtp(target, layout="single") if num_modules else target
    folder = checkpoints.copy(files.folder, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match=lost):
        LLM(
            folder, speculative_config={"method": "mtp", "num_speculative_tokens": 2}, verbose=False
        )
