"""`specjax info`: memory by hand formulas from the configs, both forms of the report, bad input."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from specjax.cli import main
from specjax.commands import info
from specjax.commands.info_text import as_lines, as_text
from specjax.config import SpeculativeConfig
from specjax.serving.memory import Memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIGS = BENCHMARKS / "configs"
MIB = 2**20
STATE_MIB = {
    "Qwen3.5-0.8B": 18,
    "Qwen3.5-2B": 18,
    "Qwen3.5-4B": 48,
    "Qwen3.5-9B": 48,
    "Qwen3.5-27B": 144,
    "Qwen3.5-35B-A3B": 60,
    "Qwen3-Next-80B-A3B": 72,
}
LLAMA = "Llama-3.1-8B"
MODELS = [*STATE_MIB, LLAMA]
USABLE = {"h100": 81559 * MIB * 9 // 10, "h200": 143771 * MIB * 9 // 10}


class Sums:
    """What a published model takes, from the numbers of its config alone."""

    def __init__(self, name):
        config = json.loads((CONFIGS / name / "config.json").read_text())
        self.config = config = config.get("text_config", config)
        self.is_hybrid = "linear_num_value_heads" in config
        self.dim, self.vocab = config["hidden_size"], config["vocab_size"]
        self.num_heads, self.num_kv_heads = (
            config[f"num_{kind}_heads"] for kind in ("attention", "key_value")
        )
        self.head_dim = config.get("head_dim", self.dim // self.num_heads)
        num_layers = config["num_hidden_layers"]
        self.num_attention = num_layers // 4 if self.is_hybrid else num_layers
        self.num_delta = num_layers - self.num_attention
        if self.is_hybrid:
            self.values = config["linear_num_value_heads"]
            key_dim, self.value_dim = (
                config[f"linear_{kind}_head_dim"] for kind in ("key", "value")
            )
            self.keys = config["linear_num_key_heads"] * key_dim
            self.channels = 2 * self.keys + self.values * self.value_dim
            self.state_elements = self.values * key_dim * self.value_dim  # of a layer

    def embedding(self):
        return self.vocab * self.dim

    def parameters(self):
        attention = self.num_attention * self.attention_layer()
        delta = self.num_delta * (self.delta() + self.mlp() + 2 * self.dim) if self.is_hybrid else 0
        heads = 1 if self.config["tie_word_embeddings"] else 2
        return attention + delta + heads * self.embedding() + self.dim

    def attention_layer(self):
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gated, norms = (2, 2 * self.head_dim) if self.is_hybrid else (1, 0)
        projections = self.dim * (gated * query + 2 * kv) + query * self.dim
        return projections + norms + self.mlp() + 2 * self.dim

    def delta(self):
        inner = self.values * self.value_dim
        inputs = self.dim * (self.channels + inner + 2 * self.values)
        conv = self.config["linear_conv_kernel_dim"] * self.channels
        return inputs + conv + 2 * self.values + self.value_dim + inner * self.dim

    def mlp(self):
        if "num_experts" not in self.config:
            return 3 * self.dim * self.config["intermediate_size"]
        num_experts, inner, shared = (
            self.config[key]
            for key in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
        )
        routed = num_experts * (self.dim + 3 * self.dim * inner)
        return routed + 3 * self.dim * shared + self.dim

    def mtp(self):
        return 2 * self.dim * self.dim + 3 * self.dim + self.attention_layer()

    def exact(self):
        """Parameters that are f32 whatever the rest is."""
        return 2 * self.values * self.num_delta if self.is_hybrid else 0

    def kv_per_token(self, num_layers):
        return num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def state(self):
        return self.num_delta * self.state_elements * 4

    def rings(self, num_drafts):
        """Inputs in bf16 of W + K tokens; in f32 corrections of K + 1, keys and decays of twice
        as many."""
        rows = num_drafts + 1
        inputs = 2 * (self.config["linear_conv_kernel_dim"] - 1 + rows) * self.channels
        kept = self.values * self.value_dim + 2 * (self.keys + self.values)
        return self.num_delta * (inputs + 4 * rows * kept)


def describe(name, num_drafts=3, **settings):
    speculation = None
    if num_drafts and name != LLAMA:
        speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=num_drafts)
    settings = {"dtype": "bfloat16", **settings}
    return info.describe(CONFIGS / name, speculation=speculation, **settings)


@pytest.fixture(scope="module")
def reports():
    """Every published model with K = 3."""
    return {name: describe(name) for name in MODELS}


def run_json(capsys, *argv):
    assert main(["info", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_config_is_known():
    # Of one there are times, the others have tests.
    others = {"Llama-3.2-1B", "GLM-4.7-Flash", "DeepSeek-V3"}
    others |= {"GLM-4.5-Air", "Ministral-3-8B", "Mistral-7B-v0.1"}  # steps of these are compiled
    known = set(MODELS) | PARAMETERS.keys() | others
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == known


# Parameters as the model cards give them, and bytes of keys and values per token.
PARAMETERS = {
    "Qwen3-30B-A3B": (30.5e9, 48 * 2 * 4 * 128 * 2),
    "gpt-oss-20b": (20.9e9, 24 * 2 * 8 * 64 * 2),
    "Phi-4": (14.66e9, 40 * 2 * 10 * 128 * 2),
    "Qwen2.5-7B": (7.61e9, 28 * 2 * 4 * 128 * 2),
    "Qwen3-8B": (8.19e9, 36 * 2 * 8 * 128 * 2),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_without_recurrent_states(name):
    report = info.describe(CONFIGS / name, dtype="bfloat16")
    num_parameters, token = PARAMETERS[name]
    assert report["weights"]["num_parameters"] == pytest.approx(num_parameters, rel=2e-3)
    assert report["cache"]["kv_bytes_per_token"]["target"] == token
    # Half of gpt-oss's layers have windows of 128 tokens: 256 requests have so many, 8 pages, once
    # for themselves and once cached, with 4 for a round and parts; and there is a chunk of 8192.
    own, pages = {"gpt-oss-20b": ({"128 tokens": token / 2}, 256 * (8 + 4 + 8) + 512)}.get(
        name, (None, 0)
    )
    assert report["cache"]["window_bytes_per_token"] == own
    beside, full = (pages * 16 * token / 2, token / 2) if own else (0, token)
    h200 = report["h200"]
    (context,) = h200["context_tokens"].values()
    room = h200["usable_bytes"] - h200["weight_bytes"] - beside
    assert context == pytest.approx(room / full, abs=16)


def test_latents_take_what_their_sizes_say():
    report = describe("GLM-4.7-Flash")
    queries, latents, out = 768 * 20 * (192 + 64), 20 * (192 + 256) * 512, 20 * 256 * 2048
    attention = 2048 * (768 + 512 + 64) + 768 + queries + 512 + latents + out + 2 * 2048
    experts = 64 * 2048 + 64 + (64 + 1) * 3 * 2048 * 1536
    layers = 47 * attention + 3 * 2048 * 10240 + 46 * experts
    assert report["weights"]["num_parameters"] == layers + 2 * 154880 * 2048 + 2048
    module = attention + experts + 2 * 2048 * 2048 + 3 * 2048
    assert report["drafter"]["num_parameters"] == module
    assert report["cache"]["kv_bytes_per_token"]["all"] == (47 + 1) * (512 + 64) * 2


def test_a_slot_is_a_state_and_rings(reports):
    cases = {(name, 3): reports[name] for name in STATE_MIB}
    cases |= {("Qwen3.5-27B", k): describe("Qwen3.5-27B", k) for k in (0, 1, 5)}
    for (name, num_drafts), report in cases.items():
        sums, cache = Sums(name), report["cache"]
        slot = cache["slot_bytes"]
        assert slot["state"] == sums.state() == STATE_MIB[name] * MIB
        rings = [slot[name] for name in ("ring", "u", "k", "decay")]
        assert sum(rings) == slot["all"] - slot["state"] == sums.rings(num_drafts)
        assert cache["num_snapshots"] == num_drafts + 1
        assert cache["snapshot_bytes"] == (num_drafts + 1) * slot["state"]
        assert cache["slot_over_state"] == slot["all"] / slot["state"]
        assert cache["snapshots_over_state"] == num_drafts + 1


def test_keys_and_values_per_token(reports):
    kv = {name: report["cache"]["kv_bytes_per_token"] for name, report in reports.items()}
    kib = {name: (one["target"] / 1024, (one["drafter"] or 0) / 1024) for name, one in kv.items()}
    assert kib["Qwen3.5-27B"] == (64, 4) and kib["Qwen3-Next-80B-A3B"] == (24, 2)
    assert kib[LLAMA] == (128, 0)
    for name, one in kv.items():
        sums = Sums(name)
        drafter = None if name == LLAMA else sums.kv_per_token(1)
        assert one["target"] == sums.kv_per_token(sums.num_attention)
        assert one["drafter"] == drafter and one["all"] == one["target"] + (drafter or 0)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_add_up(reports, name):
    sums, report = Sums(name), reports[name]
    num_parameters = sums.parameters()
    assert report["weights"]["num_parameters"] == num_parameters
    billions = float(re.search(r"([\d.]+)B", name)[1])
    assert 0.93 * billions < num_parameters / 1e9 < 1.07 * billions
    assert report["weights"]["loaded_bytes"] == {
        "float32": 4 * num_parameters,
        "bfloat16": 2 * num_parameters + 2 * sums.exact(),
    }
    if name != LLAMA:
        assert report["drafter"]["num_parameters"] == sums.mtp()
        assert report["drafter"]["loaded_bytes"]["bfloat16"] == 2 * sums.mtp()


@pytest.mark.parametrize("gpu", USABLE)
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_batch_is_the_last_that_fits(reports, name, gpu):
    sums, found = Sums(name), reports[name][gpu]
    is_hybrid = sums.is_hybrid
    weights = 2 * (sums.parameters() + sums.exact()) + (2 * sums.mtp() if is_hybrid else 0)
    per_token = sums.kv_per_token(sums.num_attention + is_hybrid)
    beside = 2 * sums.dim if is_hybrid else 0  # the drafter's last hidden state
    slots = {"largest_batch": beside, "largest_batch_with_snapshots": beside}
    if is_hybrid:
        slots["largest_batch"] += sums.state() + sums.rings(3)
        slots["largest_batch_with_snapshots"] += 4 * sums.state()
    else:
        assert found["largest_batch_with_snapshots"] is None
        del slots["largest_batch_with_snapshots"]
    assert found["usable_bytes"] == USABLE[gpu] and found["weight_bytes"] == weights
    for key, slot in slots.items():
        for length in 4096, 32768:
            batch = 0
            while weights + (batch + 1) * (slot + length * per_token) <= USABLE[gpu]:
                batch += 1
            assert found[key][f"{length} tokens"] == batch


def test_weights_that_do_not_fit_are_said_not_to(reports):
    h200 = reports["Qwen3-Next-80B-A3B"]["h200"]
    none = {"4096 tokens": 0, "32768 tokens": 0}
    assert h200["largest_batch"] == h200["largest_batch_with_snapshots"] == none
    assert h200["reason"] == "the weights alone do not fit; 2 such devices would hold them"
    assert all(reports[name]["h200"]["reason"] is None for name in MODELS if "80B" not in name)


def test_attention_alone_has_pages_and_no_slots(capsys, reports):
    report = reports[LLAMA]
    assert report["model"]["is_recurrent"] is False and report["drafter"] is None
    cache, requests = report["cache"], report["requests"]
    absent = ("slot_bytes", "slot_over_state", "num_snapshots", "snapshot_bytes")
    assert all(cache[key] is None for key in absent) and cache["drafter_slot_bytes"] is None
    assert requests["slot_bytes"] == 0 and requests["total_bytes_with_snapshots"] is None
    assert main(["info", str(CONFIGS / LLAMA)]) == 0
    assert not re.search("slot bytes +state|snapshot|^drafter$", capsys.readouterr().out, re.M)


def test_requests_add_up(capsys, monkeypatch):
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: None)  # no limit on pages
    sizes = "--max-num-seqs 5 --max-model-len 1001 --method mtp --k 2 --dtype bfloat16"
    report = run_json(capsys, "--model", str(CONFIGS / "Qwen3.5-9B"), *sizes.split())
    sums, requests = Sums("Qwen3.5-9B"), report["requests"]
    weights = 2 * (sums.parameters() + sums.exact() + sums.mtp())
    pages = 5 * 63 * 16 * sums.kv_per_token(sums.num_attention + 1)
    slots = 5 * (sums.state() + sums.rings(2) + 2 * sums.dim)
    assert requests["pages_per_request"] == 63 and report["this_device"]["num_pages"] == 5 * 63
    assert (requests["weight_bytes"], requests["page_bytes"]) == (weights, pages)
    assert requests["slot_bytes"] == slots and requests["total_bytes"] == weights + pages + slots
    more = 5 * (2 * sums.state() - sums.rings(2))
    assert requests["total_bytes_with_snapshots"] == requests["total_bytes"] + more
    assert report["this_device"]["pool_bytes"] == pages


def test_float32_doubles_all_but_what_is_float32_already():
    half, full = (describe("Qwen3.5-0.8B", dtype=dtype) for dtype in ("bfloat16", "float32"))
    for section in "h100", "h200", "weights", "drafter":
        assert half[section] == full[section]  # these do not depend on it
    assert full["cache"]["kv_bytes_per_token"]["all"] == 2 * 14 * 1024
    one, two = half["cache"]["slot_bytes"], full["cache"]["slot_bytes"]
    assert all(two[name] == one[name] for name in ("state", "u", "k", "decay"))
    assert two["ring"] == 2 * one["ring"]


def test_a_config_may_be_a_file_or_a_folder_and_given_in_two_ways(capsys, tmp_path):
    file = CONFIGS / "Qwen3.5-0.8B" / "config.json"
    renamed = tmp_path / "small.json"
    renamed.write_text(file.read_text())
    ways = [str(file)], [str(file.parent)], ["--model", str(file.parent)], [str(renamed)]
    found = [run_json(capsys, *way, "--max-num-seqs", "2") for way in ways]
    origins = [report["model"].pop("config") for report in found]
    assert origins == [str(file)] * 3 + [str(renamed)]
    assert all(report == found[0] for report in found)
    weights = found[0]["weights"]
    assert weights["are_here"] is False and weights["stored_bytes"] is None


TEXTS = [
    *((("some_bytes", n), f"{n:,} bytes") for n in (0, 1023)),
    *((("some_bytes", 2**30 - 1), "1024.0 MiB"), (("some_bytes", 5 * 2**30), "5.0 GiB")),
    *((("bytes", {"a": 1024, "b": 3 * MIB}), "a: 1.0 KiB, b: 3.0 MiB"), (("n", 12345), "12,345")),
    *((("x", None), "none"), (("x", []), "none"), (("x", [1, "b"]), "1, b"), (("x", "a"), "a")),
    *((("bytes", True), "yes"), (("bytes", False), "no"), (("ratio", 1.09812), "1.098")),
]


def test_values_in_text():
    for (key, value), expected in TEXTS:
        assert as_text(key, value) == expected


def test_the_text_is_the_report(capsys, monkeypatch):
    """A section each, without what there is nothing of, after the answer."""
    made = {"answer": {"fits": "yes"}, "some_place": {"a_b": 5, "c": None}, "drafter": None}
    assert list(as_lines(made)) == ["fits      yes", "", "some place", f"  {'a b':30}5"]
    memory = Memory("the machine", 2**33, None)
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: memory)
    argv = [str(CONFIGS / "Qwen3.5-27B"), "--method", "mtp"]
    report = run_json(capsys, *argv)
    assert main(["info", *argv]) == 0
    assert capsys.readouterr().out.splitlines() == [*as_lines(report)]


def test_a_pool_that_does_not_fit_the_device_is_a_reason(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no room")

    monkeypatch.setattr("specjax.serving.memory.EngineNeeds.fitted", refuse)
    device = describe("Qwen3.5-0.8B")["this_device"]
    assert device["reason"] == "no room" and device["max_full_length_requests"] == 0


def test_the_published_table_is_what_the_code_says(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("memory_table", BENCHMARKS / "memory_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = json.loads((BENCHMARKS / "results" / "memory_h200.json").read_text())
    made = module.tables(written["settings"]["k"], written["settings"]["page_size"])
    assert json.loads(json.dumps(made)) == {key: written[key] for key in made}


def test_a_checkpoint_and_its_eagle3_head_add_up(capsys, checkpoints):
    target = checkpoints.target(vocab_size=300, num_hidden_layers=3)
    drafter = str(checkpoints.eagle3(target).folder)
    argv = [str(target.folder), "--drafter", drafter, "--max-num-seqs", "3"]
    report = run_json(capsys, *argv, "--max-model-len", "100")
    num_parameters = sum(tensor.numel() for tensor in target.hf.parameters())
    assert report["model"]["model_type"] == "llama" and report["model"]["num_layers"] == 3
    assert report["model"]["has_tokenizer"] is False and report["weights"]["are_here"] is True
    assert report["weights"]["num_parameters"] == num_parameters
    assert report["weights"]["stored_bytes"] == {"float32": 4 * num_parameters}
    assert report["weights"]["loaded_bytes"]["bfloat16"] == 2 * num_parameters
    config = target.hf.config
    token = 2 * config.num_key_value_heads * (config.hidden_size // 4) * 4
    kv = report["cache"]["kv_bytes_per_token"]
    assert kv == {"target": 3 * token, "drafter": token, "all": 4 * token}
    assert report["requests"]["pages_per_request"] == 7
    device = report["this_device"]
    assert device["num_pages"] == 21 and device["max_full_length_requests"] == 3
    assert device["pool_bytes"] == 21 * 16 * 4 * token
    assert list(report["h200"]["largest_batch"]) == ["512 tokens"]  # the model's limit
    assert main(["info", *argv]) == 0
    assert f"num parameters                {num_parameters:,}" in capsys.readouterr().out


def test_weights_and_a_config_alone_say_the_same(capsys, checkpoints, tmp_path):
    made = checkpoints.mtp(checkpoints.target("qwen3_5"))
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    mtp = ["--method", "mtp", "--k", "2"]
    with_weights = run_json(capsys, str(made.folder), *mtp)
    without = run_json(capsys, str(tmp_path), *mtp)
    for section in "drafter", "cache", "requests", "h200", "this_device":
        assert with_weights[section] == without[section]
    num_mtp = sum(tensor.numel() for tensor in made.tensors.values())
    assert without["drafter"]["num_parameters"] == num_mtp
    assert with_weights["weights"].pop("stored_bytes") and with_weights["weights"].pop("are_here")
    assert without["weights"].pop("stored_bytes") is None
    assert without["weights"].pop("are_here") is False
    assert with_weights["weights"] == without["weights"]


def test_a_checkpoint_without_its_module_is_refused(capsys, checkpoints):
    folder = str(checkpoints.target("qwen3_5_text").folder)
    assert run_json(capsys, folder)["drafter"] is None
    assert main(["info", folder, "--method", "mtp"]) == 2
    assert "no tensor mtp.fc.weight" in capsys.readouterr().err


def test_nothing_is_allocated_for_a_config():
    before = sum(x.nbytes for x in jax.live_arrays())
    describe("Qwen3.5-27B")
    assert sum(x.nbytes for x in jax.live_arrays()) <= before
