"""`specjax info`: what is asked first; and with --devices what each of several GPUs would hold."""

import json
from pathlib import Path

from specjax.cli import main

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def test_what_each_of_several_devices_would_hold(capsys):
    """DeepSeek-V3, whose 671 billion parameters are more than eight H200s hold in bf16."""
    model = str(CONFIGS / "DeepSeek-V3")
    found = {}
    for number in 8, 11:
        assert main(["info", model, "--devices", str(number), "--max-num-seqs", "4", "--json"]) == 0
        found[number] = json.loads(capsys.readouterr().out)
    report = found[8]
    dim, num_exact = 7168, 58 * 256  # corrections of the router, which stay in f32
    attention = dim * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 16384 * dim
    dense, expert = 3 * dim * 18432, 3 * dim * 2048
    sparse = 257 * expert + 256 * dim + 256
    parameters = 61 * (attention + 2 * dim) + 3 * dense + 58 * sparse + 2 * 129280 * dim + dim
    assert report["weights"]["num_parameters"] == parameters
    h200, weights = report["h200"], 2 * (parameters + num_exact)
    assert h200["weight_bytes"] == weights and h200["weight_bytes_per_device"] == -(-weights // 8)
    latents = 4 * report["requests"]["max_model_len"] * 61 * 576 * 2
    assert h200["request_bytes_per_device"] == latents // 8
    assert h200["reason"] == "the weights alone do not fit; 10 such devices would hold them"
    assert set(h200["largest_batch"].values()) == {0}
    others = found[11]["h200"]
    assert others["reason"] is None
    room = 11 * others["usable_bytes"] - weights
    assert others["largest_batch"]["4096 tokens"] == room // (4096 * 61 * 576 * 2)


def test_the_first_three_lines_answer(capsys, monkeypatch):
    """Whether it fits, how many requests, what context: the report's own figures."""
    monkeypatch.setattr("specjax.serving.memory.read_memory", lambda: None)
    for name in "Qwen3.5-27B", "Qwen3-Next-80B-A3B":
        argv = [str(CONFIGS / name), "--max-num-seqs", "3", "--max-model-len", "1000"]
        assert main(["info", *argv, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert main(["info", *argv]) == 0
        lines = capsys.readouterr().out.splitlines()[:3]
        assert [line.split()[0] for line in lines] == ["fits", "requests", "context"]
        assert [line.partition(" ")[2].strip() for line in lines] == [*report["answer"].values()]
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
