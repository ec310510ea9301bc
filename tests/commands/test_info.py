"""`specjax info`: memory by hand formulas from the configs, both forms of the report, bad input."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from specjax.cli import main
from specjax.commands import info
from specjax.commands.info_text import as_size
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


def fail(capsys, *argv):
    assert main(["info", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: error: ") and captured.err.count("\n") == 1
    assert not captured.out
    return captured.err


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


def test_a_slot_of_27b_is_little_more_than_a_state(reports):
    cache = reports["Qwen3.5-27B"]["cache"]
    assert cache["slot_bytes"]["all"] <= 1.1 * cache["slot_bytes"]["state"]
    assert cache["slot_over_state"] == pytest.approx(1.0981, abs=1e-4)
    assert cache["snapshot_bytes"] == 4 * 144 * MIB and cache["snapshots_over_state"] == 4


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


def test_parameters_of_27b_are_those_published(reports):
    report = reports["Qwen3.5-27B"]
    embedding = Sums("Qwen3.5-27B").embedding()
    read_per_step = report["weights"]["num_parameters"] - embedding
    assert round(read_per_step / 1e9, 1) == 25.6
    assert round(embedding / 1e9, 2) == 1.27  # and the head's as much
    assert round(report["drafter"]["num_parameters"] / 1e9, 2) == 0.42


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
    argv = [
        "--model",
        str(CONFIGS / "Qwen3.5-9B"),
        "--max-num-seqs",
        "5",
        "--max-model-len",
        "1001",
    ]
    report = run_json(capsys, *argv, "--method", "mtp", "--k", "2", "--dtype", "bfloat16")
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


SIZE = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse(text):
    """A value of the text as what the JSON has, numbers as (value, unit of the last digit)."""
    if mapping := re.findall(r"([^:,]+): (.+?)(?=, [^:,]+: |$)", text):
        return {name.strip(): parse(value) for name, value in mapping}
    if match := re.fullmatch(r"(-?[\d,]+)(\.\d+)?(?:e(\S+))?(?: (bytes|[KMG]iB))?", text):
        unit = SIZE[match[4] or "bytes"] * 10.0 ** int(match[3] or 0)
        value = float(match[1].replace(",", "") + (match[2] or "")) * unit
        digit = unit * 10.0 ** (1 - len(match[2])) if match[2] else 0
        return value, digit
    return {"yes": True, "no": False, "none": []}.get(text, text)


def agrees(value, parsed):
    if isinstance(value, dict):
        return value.keys() == parsed.keys() and all(agrees(value[k], parsed[k]) for k in value)
    if value is None:
        return parsed in ("none", [])
    if isinstance(value, bool | str | list) or not isinstance(parsed, tuple):
        return value == parsed
    return abs(value - parsed[0]) <= max(0.51 * parsed[1], 1e-3 * abs(value) * (parsed[1] == 0))


@pytest.mark.parametrize("name", ["Qwen3.5-27B", LLAMA])
def test_json_and_text_agree(capsys, name, monkeypatch):
    monkeypatch.setattr(
        "specjax.serving.memory.read_memory", lambda: Memory("the machine", 2**33, None)
    )
    argv = [str(CONFIGS / name), *([] if name == LLAMA else ["--method", "mtp"])]
    report = run_json(capsys, *argv)
    assert main(["info", *argv]) == 0
    sections: dict[str, dict] = {}
    for line in capsys.readouterr().out.splitlines()[4:]:  # after the answer
        if not line.startswith("  "):
            current = sections.setdefault(line, {})
        else:
            key, value = re.fullmatch(r"  (.+?) {2,}(.*)", line).groups()
            current[key] = value
    del report["answer"]
    expected = {name.replace("_", " "): values for name, values in report.items() if values}
    assert sections.keys() == expected.keys()
    for section in set(sections) - {"environment", "model"}:
        values = {k.replace("_", " "): v for k, v in expected[section].items() if v is not None}
        assert sections[section].keys() == values.keys()
        for key, value in values.items():
            assert agrees(value, parse(sections[section][key])), (key, value)
    model = sections["model"]
    assert model["model type"] == report["model"]["model_type"]
    assert model["hidden size"] == f"{report['model']['hidden_size']:,}"


def test_sizes_in_text():
    assert [as_size(n) for n in (0, 1023, 1024, 3 * MIB, 2**30 - 1, 5 * 2**30)] == [
        *("0 bytes", "1,023 bytes", "1.0 KiB", "3.0 MiB", "1024.0 MiB", "5.0 GiB"),
    ]


def test_bad_input_is_one_clear_line(capsys, tmp_path):
    small = str(CONFIGS / "Qwen3.5-0.8B")
    assert "given twice" in fail(capsys, small, "--model", small)
    assert "no model is given; pass one as MODEL or with --model" in fail(capsys)
    missing = tmp_path / "config.json"
    for argv in [str(missing)], ["--model", str(missing)], [str(tmp_path)]:
        assert f"{missing} cannot be read (No such file" in fail(capsys, *argv)
    assert "no such folder" in fail(capsys, "--model", str(tmp_path / "none"))
    assert "no such folder: 'demo-nothing'" in fail(capsys, "--model", "demo-nothing")
    missing.write_text(json.dumps({"hidden_size": 32}))
    assert "model_type=None is not supported" in fail(capsys, str(missing))
    missing.write_text("[]")
    assert "is not a JSON object" in fail(capsys, str(tmp_path))
    assert "max_num_seqs=0" in fail(capsys, small, "--max-num-seqs", "0")
    assert "page_size=0" in fail(capsys, small, "--page-size", "0")
    assert "exceeds the 262144 positions" in fail(capsys, small, "--max-model-len", "262145")


def test_bad_speculation_is_one_clear_line(capsys, tmp_path):
    small, llama = str(CONFIGS / "Qwen3.5-0.8B"), str(CONFIGS / LLAMA)
    assert "--k goes with --drafter" in fail(capsys, small, "--k", "3")
    assert "eagle3 lacks a checkpoint" in fail(capsys, small, "--method", "eagle3")
    mtp = ["--method", "mtp"]
    assert "num_speculative_tokens=0" in fail(capsys, small, *mtp, "--k", "0")
    assert "method 'mtp' needs a model" in fail(capsys, llama, *mtp)
    config = json.loads((CONFIGS / "Qwen3.5-0.8B" / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "mtp_num_hidden_layers=2 is not supported" in fail(capsys, str(tmp_path), *mtp)


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
    assert "no tensor mtp.fc.weight" in fail(capsys, folder, "--method", "mtp")


def test_nothing_is_allocated_for_a_config():
    before = sum(x.nbytes for x in jax.live_arrays())
    describe("Qwen3.5-27B")
    assert sum(x.nbytes for x in jax.live_arrays()) <= before
