"""`specjax info --compile`: bad input, and what is counted without compiling anything."""

import json
from pathlib import Path

import jax
import pytest

from specjax.cli import main
from specjax.commands.compile_report import as_json, as_lines
from specjax.inspect import compile as compiler
from specjax.inspect import report, resources, step
from specjax.inspect.hlo import Launch
from specjax.inspect.minimum import minimum_bytes
from specjax.inspect.pallas_bytes import Array, CachedContext, Call, touched
from specjax.inspect.report import StepRequest, part_of

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
LLAMA, QWEN, EXPERTS = (
    str(CONFIGS / name) for name in ("Llama-3.1-8B", "Qwen3.5-4B", "Qwen3.5-35B-A3B")
)
COMPILE = ["--compile", "h200"]


def fail(capsys, *argv):
    assert main(["info", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("specjax: error: ") and captured.err.count("\n") == 1
    assert not captured.out
    return captured.err


@pytest.fixture
def nothing_runs(monkeypatch):
    """As with a plugin, but whoever gets as far as compiling has gone too far."""

    def run(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(compiler, "check_tools", lambda: None)
    monkeypatch.setattr(compiler.subprocess, "run", run)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--compile", "h300"], "compile='h300' is not a known target; choose one of h100, h200"),
        ([*COMPILE, "--batch-size", "0"], "batch_size=0 must be an integer of at least 1"),
        ([*COMPILE, "--k", "-1", "--method", "eagle"], "k=-1 must be an integer of at least 0"),
        ([*COMPILE, "--context", "0"], "context=0 must be"),
        ([*COMPILE, "--context", "131072"], "made for 131072; lower it"),
        ([*COMPILE, "--layers", "0"], "layers=0 must be"),
        ([*COMPILE, "--layers", "33"], "layers=33 must be in 1..32"),
        ([*COMPILE, "--gemm", "cutlass"], "gemm='cutlass' is not supported; choose one of triton"),
        ([*COMPILE, "--k", "3"], "k=3 drafts need a drafter"),
        ([*COMPILE, "--method", "eagle3"], "eagle3 lacks a checkpoint"),
        ([*COMPILE, "--method", "ngram"], "method 'ngram' drafts without a model"),
        ([*COMPILE, "--method", "mtp"], "method 'mtp' needs a model"),
        ([*COMPILE, "--max-model-len", "64"], "--max-model-len does not go with --compile; give"),
        ([*COMPILE, "--max-num-seqs", "4"], "--max-num-seqs does not go with --compile"),
        ([*COMPILE, "--adaptive", "--method", "eagle"], "--adaptive does not go with --compile"),
        ([*COMPILE, "--speculative-config", "{}"], "--speculative-config does not go with"),
        ([*COMPILE, "--page-size", "0"], "page_size=0 must be"),
        ([*COMPILE, "--devices", "2"], "--devices does not go with --compile"),
    ],
)
def test_bad_input_is_refused_before_any_work(capsys, nothing_runs, argv, message):
    assert message in fail(capsys, LLAMA, *argv)


def test_a_config_is_needed_and_weights_are_not(capsys, nothing_runs, tmp_path):
    assert "no model is given" in fail(capsys, *COMPILE)
    assert "cannot be read" in fail(capsys, str(tmp_path), *COMPILE)
    drafter = ["--drafter", str(tmp_path), "--method", "eagle"]
    assert str(tmp_path) in fail(capsys, LLAMA, *COMPILE, *drafter)
    with pytest.raises(AssertionError, match="compiled"):
        main(["info", LLAMA, *COMPILE, "--method", "eagle"])


def test_options_of_a_compilation_go_with_it(capsys):
    for option in ["--batch-size", "4"], ["--context", "9"], ["--layers", "1"], ["--resources"]:
        assert f"{option[0]} goes with --compile" in fail(capsys, LLAMA, *option)


def test_missing_tools_are_named(capsys, monkeypatch):
    monkeypatch.setattr(compiler, "has_cuda_plugin", lambda: False)
    message = fail(capsys, LLAMA, *COMPILE)
    assert f"pip install 'jax[cuda13]=={jax.__version__}'" in message
    monkeypatch.setattr(compiler, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(resources, "PTXAS", ())
    monkeypatch.setattr(resources.shutil, "which", lambda _: None)
    monkeypatch.setattr(resources.sysconfig, "get_paths", lambda: {"purelib": "/nowhere"})
    message = fail(capsys, LLAMA, *COMPILE)
    assert "ptxas was not found" in message and "nvidia-cuda-nvcc" in message


def test_a_head_of_the_models_own_shape(capsys):
    assert main(["info", LLAMA, "--method", "eagle", "--json"]) == 0
    drafter = json.loads(capsys.readouterr().out)["drafter"]
    assert drafter["checkpoint"] == "a head of the model's own shape, without weights"
    dim, inner = 4096, 14336
    layer = dim * (dim + 2 * 1024) + dim * dim + 3 * dim * inner + dim
    assert drafter["num_parameters"] == 2 * dim * dim + layer
    for target in QWEN, EXPERTS:  # a dense layer of their width
        assert main(["info", target, "--method", "eagle", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["drafter"]["num_parameters"] > 0


def minimum(request, **given):
    parts = step.open_parts(
        str(request.model), request.speculation, request.num_layers, report.DTYPE
    )
    return minimum_bytes(
        parts.target,
        parts.drafter,
        parts.params.target,
        parts.params.drafter,
        batch=request.batch,
        k=request.k,
        context=request.context,
        dtype=report.DTYPE,
        **given,
    )


def test_the_minimum_of_llama_by_hand():
    least = minimum(StepRequest(model=LLAMA, batch=64, k=3, method="eagle"))
    dim, inner, vocab, kv = 4096, 14336, 128256, 1024
    layer = 2 * (dim * (dim + 2 * kv) + dim * dim + 3 * dim * inner)
    head, token = 2 * dim * vocab, 2 * 2 * kv
    assert least.weights == 32 * (layer + 4 * dim) + head + 2 * dim
    assert least.keys_and_values == 32 * token * (64 * 2048 + 64 * 4)
    assert least.states == 0
    fc = 2 * 2 * dim * dim
    draft = fc + layer + 2 * dim + head
    assert least.draft == 3 * draft + token * 64 * (3 * 2048 + 2)
    assert least.observe == fc + 2 * dim * 2 * kv + token * 64 * 4
    assert least.step == least.verify + least.draft + least.observe


def test_the_minimum_of_a_hybrid_by_hand():
    one = minimum(StepRequest(model=QWEN, batch=2, k=0, num_layers=4))
    with_module = minimum(StepRequest(model=QWEN, batch=2, k=1, num_layers=4, method="mtp"))
    assert one.states == 2 * 2 * 3 * 32 * 128 * 128 * 4
    assert one.keys_and_values == 2 * 2 * 4 * 256 * (2 * 2048 + 2)
    assert one.draft == one.observe == 0 < with_module.observe < with_module.draft
    head = 2 * 248320 * 2560  # tied: read as the head, though it is an embedding
    assert with_module.draft > head and one.weights > head


def test_the_minimum_within_windows_by_hand():
    model = str(CONFIGS / "gpt-oss-20b")
    least = minimum(StepRequest(model=model, batch=2, k=0, num_layers=4, context=1000))
    token = 2 * 2 * 8 * 64
    assert least.keys_and_values == 2 * 2 * token * (1000 + 128 + 2)


def test_of_experts_no_more_are_read_than_are_chosen():
    model = str(CONFIGS / "Qwen3.5-35B-A3B")
    few, all_of_them = (
        minimum(StepRequest(model=model, batch=batch, k=0, num_layers=1)).weights
        for batch in (1, 64)
    )
    config = json.loads((CONFIGS / "Qwen3.5-35B-A3B" / "config.json").read_text())["text_config"]
    each = 3 * 2 * config["hidden_size"] * config["moe_intermediate_size"]
    assert all_of_them - few == each * (config["num_experts"] - config["num_experts_per_tok"])


def test_the_minimum_of_drafters_by_hand():
    """At batch size 1 and K = 5: once what one pass drafts with, and the output head."""
    dim, inner, vocab, kv, k, rank = 4096, 14336, 128256, 1024, 5, 256
    qkv, head, token = 2 * dim * (dim + 2 * kv), 2 * dim * vocab, 2 * 2 * kv
    layer = qkv + 2 * (dim * dim + 3 * dim * inner) + 4 * dim

    def of(method, name, k=k, **given):
        drafter = str(CONFIGS / "drafters" / f"Llama-3.1-8B-{name}")
        request = StepRequest(model=LLAMA, batch=1, k=k, method=method, drafter=drafter)
        return minimum(request, **given)

    block = of("dflash", "DFlash")
    heads_norms = 2 * 128 * 2 * 5  # of queries and keys
    assert block.draft == 5 * layer + heads_norms + 2 * dim + head + 5 * token * 2048
    chain = of("dflash", "DSpark")
    assert chain.draft == block.draft + k * 2 * rank * vocab and chain.observe == block.observe
    chosen = of("dflash", "DFlash2")
    sides = 2 * (2 * 2 * dim + dim * 2 * 2 * dim // 16)  # of a convolution: before and after
    assert chosen.draft == block.draft + 5 * 2 * sides + 2 * dim * rank
    assert chosen.observe == block.observe
    masks, fused = of("p_eagle", "P-EAGLE"), 2 * 3 * dim * dim
    eagle = of("eagle3", "EAGLE3")
    assert eagle.draft == k * (layer + qkv + 4 * dim + head + token * 2048) + (k - 1) * token
    assert eagle.observe == fused + 2 * qkv * 2 * kv // (dim + 2 * kv) + 4 * dim + token * (k + 1)
    later = of("eagle3", "EAGLE3", k=0, is_deferred=True)
    assert later.draft == 0 and later.observe == (1 + 3) * 2 * dim  # states that are kept
    first = layer + qkv + 2 * dim  # reads two vectors, and norms one more
    assert masks.draft == first + 3 * layer + 2 * dim + head + 4 * token * 2048
    assert masks.observe == fused + first + 3 * layer + 2 * dim + 4 * token * (2048 + k + 1)
    heads = of("medusa", "Medusa")
    assert heads.draft == 5 * (2 * dim * dim + head) and heads.observe == 0


def test_the_minimum_of_a_draft_model_is_the_model_s_own_once_per_draft():
    small = str(CONFIGS / "Qwen3.5-0.8B")
    settings = {"model": QWEN, "batch": 2, "num_layers": 4}
    own = minimum(StepRequest(model=small, batch=2, k=0))
    both = minimum(StepRequest(**settings, k=3, method="draft_model", drafter=small))
    assert both.draft == 3 * (own.weights + own.keys_and_values) + (3 + 1) * own.states // 2
    assert both.observe == 0


def test_only_experts_that_real_rows_can_reach_are_counted():
    """Against routing that spreads as far as it can; padding goes where row 0 of the batch goes."""
    for batch, width, rows, num_chosen, num_experts in [
        *((1, 8, 1, 4, 64), (1, 8, 4, 4, 64), (2, 4, 3, 8, 32), (8, 4, 4, 2, 128), (1, 8, 1, 8, 4)),
    ]:
        places = iter(range(batch * width * num_chosen))
        read = set()
        for _ in range(batch * rows):
            read |= {next(places) % num_experts for _ in range(num_chosen)}
        products, dim, inner = batch * width * num_chosen, 16, 32
        operands = (batch * width, dim), (num_experts, dim, inner), (num_experts,), (products,)
        call = Call(
            tuple(Array(shape, 2) for shape in operands),
            (Array((products, inner), 2),),
            frozenset(),
        )
        load = CachedContext(batch, 10, rows, num_chosen)
        weights = touched("grouped_matmul", call, load)[0] - sum(
            one.size for one in call.operands if len(one.shape) != 3
        )
        assert weights == len(read) * dim * inner * 2


def test_a_pallas_call_that_looks_otherwise_counts_whole():
    operand, output = Array((8, 16), 2), Array((8, 4), 4)
    call = Call((operand,), (output,), frozenset())
    for name in "paged_attention", "rope_write", "gated_delta_rule", "grouped_matmul", "unknown":
        assert touched(name, call, CachedContext(1, 10)) == (256, 128)
    in_place = Call((operand,), (), frozenset({0}))
    assert touched("unknown", in_place, CachedContext(1, 10)) == (256, 256)


def launch(scope, **others):
    return Launch("fusion", "loop fusion", scope, scope, 10, 20, (), 1, None, **others)


def test_parts_of_a_step():
    names = {
        "jit(decode)/draft/jit(_layer)/add": "draft",
        "jit(decode)/verify/jit(decoder_layer)/mul": "verify",
        "jit(decode)/settle/scatter": "settle",
        "jit(decode)/settle/observe/jit(_layer)/dot_general": "observe",
        "jit(decode)/vmap()/concatenate": "other",
        "": "other",
    }
    assert {scope: part_of(launch(scope)) for scope in names} == names


def made(num_layers):
    """What a compilation might say: a kernel per layer, one in a branch that is not taken."""
    kernels = [launch(f"jit(decode)/verify/{i}") for i in range(num_layers)]
    listed = [{**vars(one), "layer": i} for i, one in enumerate(kernels)]
    listed.append({**vars(launch("jit(decode)/settle/cond")), "branches": [["cond", 1]]})
    return {
        "launches": listed,
        "large_copies": listed[:1],
        "unknown_loops": [],
        "uncaptured_conditionals": [],
        "top_level": ["kCommandBuffer"],
        "is_one_command_buffer": True,
        "memory": {"argument": 1, "output": 9, "alias": 0, "temp": 2, "peak": 3},
        "seconds": {"trace": 0.5, "compile": 1.5},
        "resources": [vars(resources.Resources("fusion", 255, 8, 16, 24, 0, 0, (4, 1, 1), (32,)))],
    }


def test_text_and_json_of_a_report(monkeypatch):
    monkeypatch.setattr(report, "compile_functions", lambda *_, **__: [made(2)])
    found = report.compile_step(LLAMA, batch=1, k=0, num_layers=2)
    assert found.num_launches == {
        **{"step": 2, "draft": 0, "verify": 2, "settle": 0, "observe": 0, "other": 0}
    }
    assert found.verify.moved == found.step.moved == 60
    assert found.layers["full_attention"].minimum == found.layers["full_attention"].maximum == 1
    assert found.state_bytes > 0 and not found.is_state_in_place
    as_dict = json.loads(json.dumps(as_json(found)))
    assert as_dict["verify"]["ratio"] == 60 / found.minimum.verify
    text = "\n".join(as_lines(found))
    assert re_line(text, "one command buffer") == "yes"
    assert "layers                        2 of 32" in text
    assert "state is updated in place     NO" in text
    assert "255 registers, spills 16 B out, 24 B in, 0 bytes shared, grid 4x1x1" in text


def re_line(text, name):
    return next(line.split()[-1] for line in text.splitlines() if line.strip().startswith(name))


PTXAS_SAYS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_write__1' for 'sm_90a'
ptxas info    : Function properties for paged_write__1
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'my_mosaic_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for my_mosaic_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 138 registers, used 2 barriers
"""


def test_what_ptxas_says():
    first, second = resources.parse_ptxas(PTXAS_SAYS)
    assert (first.name, first.kernel, first.registers) == ("paged_write__1", "paged_write", 40)
    assert first.spills and first.static_shared_bytes == 1024
    assert (first.stack_bytes, first.spill_store_bytes, first.spill_load_bytes) == (8, 12, 16)
    assert not second.spills and second.registers == 138
    (mosaic,) = [
        one for one in resources.read_resources([], "", PTXAS_SAYS, "sm_90a") if "my" in one.name
    ]
    assert mosaic.name == "my_mosaic" and mosaic.is_mosaic
