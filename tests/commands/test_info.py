"""`specjax info` for published configs, compared with transformers' models; and its two forms."""

import importlib.util
import json
from functools import cached_property
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
import torch
import transformers

from specjax.cli import main
from specjax.commands import info
from specjax.commands.info_text import as_lines, as_text
from specjax.config import SpeculativeConfig
from specjax.serving.memory import Memory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONFIGS = BENCHMARKS / "configs"
ALL = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))
LARGE = "DeepSeek-V3", "GLM-4.5-Air"  # whose layers transformers builds slowly
MIB = 2**20
STATE_MIB = {
    **{"Qwen3.5-0.8B": 18, "Qwen3.5-2B": 18, "Qwen3.5-4B": 48, "Qwen3.5-9B": 48},
    **{"Qwen3.5-27B": 144, "Qwen3.5-35B-A3B": 60, "Qwen3-Next-80B-A3B": 72},
}
LLAMA = "Llama-3.1-8B"
MODELS = [*STATE_MIB, LLAMA]
USABLE = {"h100": 81559 * MIB * 9 // 10, "h200": 143771 * MIB * 9 // 10}


class Sums:
    """Sizes of a published model: parameters by transformers, other sizes from its config."""

    def __init__(self, name):
        config = transformers.AutoConfig.from_pretrained(CONFIGS / name).get_text_config()
        self.config = config
        with torch.device("meta"):
            self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.is_hybrid = hasattr(config, "linear_num_value_heads")
        self.dim, num_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention = num_layers // 4 if self.is_hybrid else num_layers
        self.num_delta = num_layers - self.num_attention
        if self.is_hybrid:
            self.values, self.value_dim = (
                config.linear_num_value_heads,
                config.linear_value_head_dim,
            )
            self.keys = config.linear_num_key_heads * config.linear_key_head_dim
            self.channels = 2 * self.keys + self.values * self.value_dim

    @cached_property
    def sizes(self):
        """The number of elements by name, including buffers such as the routers' corrections."""
        kept = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: x.numel() for name, x in kept if "inv_freq" not in name}

    def parameters(self):
        return sum(self.sizes.values())

    def exact(self):
        """The number of parameters that are always f32."""
        ends = "A_log", "dt_bias", "e_score_correction_bias"
        return sum(size for name, size in self.sizes.items() if name.endswith(ends))

    def mxfp4(self):
        """The number of parameters that are published in MXFP4: 17 bytes for 32 parameters."""
        ends = "experts.gate_up_proj", "experts.down_proj"
        is_packed = self.config.model_type == "gpt_oss"
        return sum(n for name, n in self.sizes.items() if is_packed and name.endswith(ends))

    def mtp(self):
        """The parameters of an MTP module: an attention layer, norms and a projection."""
        where = f"layers.{self.num_attention + self.num_delta - 1}."
        layer = sum(size for name, size in self.sizes.items() if where in name)
        return 2 * self.dim * self.dim + 3 * self.dim + layer

    def kv_per_token(self, num_layers):
        config = self.config
        head_dim = getattr(config, "head_dim", None) or self.dim // config.num_attention_heads
        return num_layers * 2 * config.num_key_value_heads * head_dim * 2

    def state(self):
        return (
            self.num_delta
            * self.keys
            // self.config.linear_num_key_heads
            * (self.values * self.value_dim * 4)
        )

    def rings(self, num_drafts):
        """The bytes of a request's ring buffers, for rounds of K drafts.

        With a convolution of width W, the buffers have W + K inputs in bf16 and, in f32, K + 1
        corrections and 2 (K + 1) keys and decays.
        """
        rows = num_drafts + 1
        inputs = 2 * (self.config.linear_conv_kernel_dim - 1 + rows) * self.channels
        kept = self.values * self.value_dim + 2 * (self.keys + self.values)
        return self.num_delta * (inputs + 4 * rows * kept)


def describe(name, num_drafts=3, **settings):
    speculation = None
    if num_drafts and name in (*STATE_MIB, "GLM-4.7-Flash"):
        speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=num_drafts)
    settings = {"dtype": "bfloat16", **settings}
    return info.describe(CONFIGS / name, speculation=speculation, **settings)


@pytest.fixture(scope="module")
def sums():
    return {name: Sums(name) for name in ALL}


@pytest.fixture(scope="module")
def reports():
    """The reports of all published models, with K = 3 if the model has an MTP module."""
    return {name: describe(name) for name in ALL}


def run_json(capsys, *argv):
    assert main(["info", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in LARGE)) for n in ALL]
)
def test_parameters_are_those_of_transformers(reports, sums, name):
    report, num_parameters = reports[name], sums[name].parameters()
    assert report["weights"]["num_parameters"] == num_parameters
    assert report["weights"]["loaded_bytes"] == {
        "float32": 4 * num_parameters - (4 * 32 - 17) * sums[name].mxfp4() // 32,
        "bfloat16": 2 * num_parameters
        + 2 * sums[name].exact()
        - (2 * 32 - 17) * sums[name].mxfp4() // 32,
    }
    if report["drafter"] is not None:
        assert report["drafter"]["num_parameters"] == sums[name].mtp()
    if name in STATE_MIB:
        assert report["drafter"]["loaded_bytes"]["bfloat16"] == 2 * sums[name].mtp()


@pytest.mark.slow
def test_keys_and_values_per_token(reports, sums):
    kv = {name: report["cache"]["kv_bytes_per_token"] for name, report in reports.items()}
    latents = (512 + 64) * 2
    assert kv["GLM-4.7-Flash"]["all"] == (47 + 1) * latents
    assert kv["DeepSeek-V3"]["all"] == 61 * latents
    for name in set(ALL) - {"GLM-4.7-Flash", "DeepSeek-V3"}:
        target = sums[name].kv_per_token(sums[name].num_attention)
        drafter = sums[name].kv_per_token(1) if name in STATE_MIB else None
        assert kv[name] == {"target": target, "drafter": drafter, "all": target + (drafter or 0)}


def test_windows_leave_the_room_to_other_layers(reports, sums):
    """In gpt-oss, half of the layers have windows of 128 tokens, which are 8 pages.

    Each of 256 requests has 8 pages in use, 8 cached pages and 4 for rounds. A chunk of 8192 tokens
    has 512 pages.
    """
    for name in "gpt-oss-20b", "Qwen3-8B":
        token, h200 = sums[name].kv_per_token(sums[name].num_attention), reports[name]["h200"]
        own, num_pages, full = None, 0, token
        if name == "gpt-oss-20b":
            own, num_pages, full = {"128 tokens": token / 2}, 256 * (8 + 4 + 8) + 512, token / 2
        assert reports[name]["cache"]["window_bytes_per_token"] == own
        (context,) = h200["context_tokens"].values()
        room = h200["usable_bytes"] - h200["weight_bytes"] - num_pages * 16 * token / 2
        assert context == pytest.approx(room / full, abs=16)


def test_a_slot_is_a_state_and_rings(reports, sums):
    cases = {(name, 3): reports[name] for name in STATE_MIB}
    cases |= {("Qwen3.5-27B", k): describe("Qwen3.5-27B", k) for k in (0, 1, 5)}
    for (name, num_drafts), report in cases.items():
        cache = report["cache"]
        slot = cache["slot_bytes"]
        assert slot["state"] == sums[name].state() == STATE_MIB[name] * MIB
        rings = [slot[name] for name in ("ring", "u", "k", "decay")]
        assert sum(rings) == slot["all"] - slot["state"] == sums[name].rings(num_drafts)
        assert cache["num_snapshots"] == num_drafts + 1 == cache["snapshots_over_state"]
        assert cache["snapshot_bytes"] == (num_drafts + 1) * slot["state"]
        assert cache["slot_over_state"] == slot["all"] / slot["state"]


@pytest.mark.parametrize("gpu", USABLE)
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_batch_is_the_last_that_fits(reports, sums, name, gpu):
    own, found = sums[name], reports[name][gpu]
    is_hybrid = own.is_hybrid
    weights = 2 * (own.parameters() + own.exact()) + (2 * own.mtp() if is_hybrid else 0)
    per_token = own.kv_per_token(own.num_attention + is_hybrid)
    slots = {"largest_batch": 0}
    if is_hybrid:
        beside = 2 * own.dim  # the drafter's last hidden state
        slots["largest_batch"] = beside + own.state() + own.rings(3)
        slots["largest_batch_with_snapshots"] = beside + 4 * own.state()
    else:
        assert found["largest_batch_with_snapshots"] is None
    assert found["usable_bytes"] == USABLE[gpu] and found["weight_bytes"] == weights
    for key, slot in slots.items():
        for length in 4096, 32768:
            room, each = USABLE[gpu] - weights, slot + length * per_token
            assert found[key][f"{length} tokens"] == max(0, room // each)


@pytest.mark.slow
def test_what_each_of_several_devices_would_hold(capsys, sums):
    """DeepSeek-V3 has 671 billion parameters, too many in bf16 for eight H200s.

    Each device has the whole cache of latents.
    """
    argv = [str(CONFIGS / "DeepSeek-V3"), "--max-num-seqs", "4", "--devices"]
    report = run_json(capsys, *argv, "8")
    h200, own = report["h200"], sums["DeepSeek-V3"]
    weights = 2 * (own.parameters() + own.exact())
    assert h200["weight_bytes"] == weights
    assert 1 < 8 * h200["weight_bytes_per_device"] / weights < 1.03
    latents = 4 * report["requests"]["max_model_len"] * 61 * 576 * 2
    assert h200["request_bytes_per_device"] == latents
    assert h200["reason"] == "the weights alone do not fit; 10 such devices would hold them"
    assert set(h200["largest_batch"].values()) == {0}
    others = run_json(capsys, *argv, "16")["h200"]
    assert others["reason"] is None
    room = others["usable_bytes"] - others["weight_bytes_per_device"]
    assert others["largest_batch"]["4096 tokens"] == room // (4096 * 61 * 576 * 2)


def test_weights_of_each_device(capsys, sums):
    """Each device has all norms, and a quarter of all other weights of a Llama."""
    found = run_json(capsys, str(CONFIGS / "Llama-3.1-8B"), "--devices", "4")["h200"]
    norms = (2 * 32 + 1) * 4096
    weights = 2 * ((sums["Llama-3.1-8B"].parameters() - norms) // 4 + norms)
    assert found["weight_bytes_per_device"] == weights
    room = found["usable_bytes"] - weights
    assert found["largest_batch"]["4096 tokens"] == room // (4096 * 32 * 2 * 2 * 128 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3-Next-80B-A3B"])
def test_the_first_three_lines_answer(capsys, monkeypatch, name):
    """Whether the model fits, how many requests, and which context: the report's figures."""
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: None)
    argv = [str(CONFIGS / name), "--max-num-seqs", "3", "--max-model-len", "1000"]
    report = run_json(capsys, *argv)
    assert main(["info", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()[:3]
    assert lines == [f"{key:10}{text}" for key, text in report["answer"].items()]
    fits, requests, context = lines
    does = "no" if "80B" in name else "yes"  # 163 GB of weights, of 127 usable
    assert f"this cpu: yes; H100: {does}; H200: {does}" in fits
    assert "this cpu: 3 of 1,000 tokens" in requests and "this cpu: 1,000 tokens" in context
    for gpu in "h100", "h200":
        longest = report[gpu]["longest_context"]
        assert f"{gpu.upper()}: {longest:,} tokens" in context
        for size, num in report[gpu]["largest_batch"].items():
            assert f"{num:,} of {int(size.split()[0]):,} tokens" in requests
            assert (longest >= int(size.split()[0])) == (num > 0)


def test_attention_alone_has_pages_and_no_slots(reports):
    report = reports[LLAMA]
    assert report["model"]["is_recurrent"] is False and report["drafter"] is None
    cache, requests = report["cache"], report["requests"]
    absent = ("slot_bytes", "slot_over_state", "num_snapshots", "snapshot_bytes")
    assert all(cache[key] is None for key in absent) and cache["drafter_slot_bytes"] is None
    assert requests["slot_bytes"] == 0 and requests["total_bytes_with_snapshots"] is None


def test_requests_add_up(capsys, monkeypatch, sums):
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: None)  # no limit on pages
    sizes = "--max-num-seqs 5 --max-model-len 1001 --method mtp --k 2 --dtype bfloat16"
    report = run_json(capsys, "--model", str(CONFIGS / "Qwen3.5-9B"), *sizes.split())
    own, requests = sums["Qwen3.5-9B"], report["requests"]
    weights = 2 * (own.parameters() + own.exact() + own.mtp())
    pages = 5 * 63 * 16 * own.kv_per_token(own.num_attention + 1)
    slots = 5 * (own.state() + own.rings(2) + 2 * own.dim)
    assert requests["pages_per_request"] == 63 and report["this_device"]["num_pages"] == 5 * 63
    assert (requests["weight_bytes"], requests["page_bytes"]) == (weights, pages)
    assert requests["slot_bytes"] == slots and requests["total_bytes"] == weights + pages + slots
    more = 5 * (2 * own.state() - own.rings(2))
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
    """After the answer, the text has a section per key. Empty sections and values are left out."""
    made = {"answer": {"fits": "yes"}, "some_place": {"a_b": 5, "c": None}, "drafter": None}
    assert list(as_lines(made)) == ["fits      yes", "", "some place", f"  {'a b':30}5"]
    memory = Memory("the machine", 2**33, None)
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: memory)
    argv = [str(CONFIGS / "Qwen3.5-27B"), "--method", "mtp"]
    report = run_json(capsys, *argv)
    assert report["model"]["hidden_size"] == 5120
    assert main(["info", *argv]) == 0
    assert capsys.readouterr().out.splitlines() == [*as_lines(report)]


def test_a_pool_that_does_not_fit_the_device_is_a_reason(monkeypatch):
    fitted = Mock(side_effect=ValueError("no room"))
    monkeypatch.setattr("specjax.serving.memory.EngineNeeds.fitted", fitted)
    device = describe("Qwen3.5-0.8B")["this_device"]
    assert device["reason"] == "no room" and device["max_full_length_requests"] == 0


@pytest.mark.slow
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
    config = target.hf.config
    token = 2 * config.num_key_value_heads * (config.hidden_size // 4) * 4
    kv = report["cache"]["kv_bytes_per_token"]
    assert kv == {"target": 3 * token, "drafter": token, "all": 4 * token}
    assert report["requests"]["pages_per_request"] == 7
    device = report["this_device"]
    assert device["num_pages"] == 21 and device["max_full_length_requests"] == 3
    assert list(report["h200"]["largest_batch"]) == ["512 tokens"]  # the model's limit
    assert main(["info", *argv]) == 0
    assert f"num parameters                {num_parameters:,}" in capsys.readouterr().out


def test_weights_and_a_config_alone_say_the_same(capsys, checkpoints, tmp_path):
    made = checkpoints.mtp(checkpoints.target("qwen3_5"))
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    mtp = ["--method", "mtp", "--k", "2"]
    found, described = (run_json(capsys, str(path), *mtp) for path in (made.folder, tmp_path))
    num_mtp = sum(tensor.numel() for tensor in made.tensors.values())
    assert described["drafter"]["num_parameters"] == num_mtp
    assert found["weights"].pop("stored_bytes") and found["weights"].pop("are_here")
    assert described["weights"].pop("stored_bytes") is None
    assert described["weights"].pop("are_here") is False
    for section in "weights", "drafter", "cache", "requests", "h200", "this_device":
        assert found[section] == described[section]


def test_a_checkpoint_without_its_module_is_refused(capsys, checkpoints):
    folder = str(checkpoints.target("qwen3_5_text").folder)
    assert run_json(capsys, folder)["drafter"] is None
    assert main(["info", folder, "--method", "mtp"]) == 2
    assert "no tensor mtp.fc.weight" in capsys.readouterr().err


def test_nothing_is_allocated_for_a_config():
    before = sum(x.nbytes for x in jax.live_arrays())
    describe("Qwen3.5-27B")
    assert sum(x.nbytes for x in jax.live_arrays()) <= before
