"""`specjax info --compile`: the figures that are computed without compiling."""

import json
import re
from pathlib import Path

import jax
import pytest

from specjax.cli import build_parser, main
from specjax.commands.compile_report import as_json, as_lines, read_request
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
MIXTURE = str(CONFIGS / "Qwen3-30B-A3B")
COMPILE = ["--compile", "h200"]


def test_missing_tools_are_named(capsys, monkeypatch):
    monkeypatch.setattr(compiler, "has_cuda_plugin", lambda: False)
    assert main(["info", LLAMA, *COMPILE]) == 2
    assert f"pip install 'jax[cuda13]=={jax.__version__}'" in capsys.readouterr().err
    monkeypatch.setattr(compiler, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(resources, "PTXAS", ())
    monkeypatch.setattr(resources.shutil, "which", lambda _: None)
    monkeypatch.setattr(resources.sysconfig, "get_paths", lambda: {"purelib": "/nowhere"})
    assert main(["info", LLAMA, *COMPILE]) == 2
    assert "nvidia-cuda-nvcc" in capsys.readouterr().err


@pytest.mark.slow
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


def minimum(is_deferred=False, **asked):
    request = StepRequest(**asked)
    parts = step.open_parts(**request.models, num_devices=request.tensor_parallel_size).local
    of = parts.target, parts.drafter, parts.params
    given = {"batch": request.batch, "k": request.k, "context": request.context}
    return minimum_bytes(*of, dtype=report.DTYPE, is_deferred=is_deferred, **given)


def test_the_minimum_of_each_device():
    """Each device has all norms, and the draft head's weights that read the context."""
    one = minimum(model=LLAMA, batch=8, k=3, method="eagle")
    each = minimum(model=LLAMA, batch=8, k=3, method="eagle", tensor_parallel_size=4)
    assert 4 * each.keys_and_values == one.keys_and_values
    assert 4 * each.weights - one.weights == 3 * 2 * 4096 * (2 * 32 + 1)
    assert one.draft < 4 * each.draft and one.observe < 4 * each.observe


def test_the_minimum_of_whole_experts():
    """Eight rows use 64 of 128 experts. A device reads a quarter of each, or at most its 32."""
    asked = {"model": MIXTURE, "batch": 8, "k": 0, "num_layers": 2, "tensor_parallel_size": 4}
    parts, whole = (minimum(**asked, enable_expert_parallel=own) for own in (False, True))
    expert = 2 * 3 * 2048 * 768
    assert whole.weights - parts.weights == 2 * (32 - 64 // 4) * expert


def test_the_minimum_of_llama_by_hand():
    least = minimum(model=LLAMA, batch=64, k=3, method="eagle")
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


@pytest.mark.parametrize("head, layers", [("int8", None), (None, "int4"), ("fp8", "int8")])
def test_the_minimum_with_a_drafters_bits_by_hand(head, layers):
    """8-bit weights have an f32 scale per output, int4 a 2-byte scale per output and group."""
    asked = {"method": "eagle", "head_dtype": head, "quantization": layers}
    config = json.dumps({name: value for name, value in asked.items() if value})
    options = ["--k", "3", "--batch-size", "2", "--speculative-config", config]
    request = read_request(build_parser().parse_args(["info", LLAMA, *COMPILE, *options]))
    assert dict(request.narrow) == {n: x for n, x in asked.items() if x and n != "method"}
    plain = minimum(model=LLAMA, batch=2, k=3, method="eagle")
    least = minimum(model=LLAMA, batch=2, k=3, method="eagle", narrow=request.narrow)
    dim, inner, vocab, kv = 4096, 14336, 128256, 1024
    rows = [(2 * dim, dim), (dim, dim + 2 * kv), (dim, dim), (dim, 2 * inner), (inner, dim)]
    less = 0
    if head:
        less += dim * vocab - 4 * vocab
    if layers:
        group = 2 / 128 + 0.5 if layers == "int4" else 1
        less += sum((2 - group) * num_in * num_out for num_in, num_out in rows)
        less -= sum(4 * num_out for _, num_out in rows) * (layers == "int8")
    assert plain.draft - least.draft == 3 * less and plain.verify == least.verify
    columns = 2 * dim * dim + 2 * kv * dim  # which compute keys and values
    less = (2 - group) * columns - (4 * (dim + 2 * kv) if layers == "int8" else 0) if layers else 0
    assert plain.observe - least.observe == less


def test_the_usual_context_fits_the_model():
    for model, context in (LLAMA, 2048), ("demo-llama", 2048 - 2):
        request = read_request(build_parser().parse_args(["info", model, *COMPILE]))
        assert request.k == 0 and request.context == context


def test_the_minimum_of_a_hybrid_by_hand():
    one = minimum(model=QWEN, batch=2, k=0, num_layers=4)
    with_module = minimum(model=QWEN, batch=2, k=1, num_layers=4, method="mtp")
    assert one.states == 2 * 2 * 3 * 32 * 128 * 128 * 4
    assert one.keys_and_values == 2 * 2 * 4 * 256 * (2 * 2048 + 2)
    assert one.draft == one.observe == 0 < with_module.observe < with_module.draft
    head = 2 * 248320 * 2560  # tied: read as the head, though it is an embedding
    assert with_module.draft > head and one.weights > head


def test_the_minimum_within_windows_and_of_experts():
    model = str(CONFIGS / "gpt-oss-20b")
    least = minimum(model=model, batch=2, k=0, num_layers=4, context=1000)
    assert least.keys_and_values == 2 * 2 * (2 * 2 * 8 * 64) * (1000 + 128 + 2)
    few, many = (
        minimum(model=EXPERTS, batch=batch, k=0, num_layers=1).weights for batch in (1, 64)
    )
    assert many - few == 3 * 2 * 2048 * 512 * (256 - 8), "no more are read than are chosen"


def test_the_minimum_of_drafters_by_hand():
    """At batch size 1 and K = 5, for heads that draft in one pass or in K passes."""
    dim, inner, vocab, kv, k, rank = 4096, 14336, 128256, 1024, 5, 256
    qkv, head, token = 2 * dim * (dim + 2 * kv), 2 * dim * vocab, 2 * 2 * kv
    layer = qkv + 2 * (dim * dim + 3 * dim * inner) + 4 * dim

    def of(method, name, k=k, **given):
        drafter = str(CONFIGS / "drafters" / f"Llama-3.1-8B-{name}")
        return minimum(model=LLAMA, batch=1, k=k, method=method, drafter=drafter, **given)

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
    own = minimum(model=small, batch=2, k=0)
    both = minimum(**settings, k=3, method="draft_model", drafter=small)
    assert both.draft == 3 * (own.weights + own.keys_and_values) + (3 + 1) * own.states // 2
    assert both.observe == 0


def test_only_experts_that_real_rows_can_reach_are_counted():
    """Compared with the routing that uses the most experts. Padding uses the experts of row 0."""
    for batch, width, rows, num_chosen, num_experts in [
        *((1, 8, 1, 4, 64), (1, 8, 4, 4, 64), (2, 4, 3, 8, 32), (8, 4, 4, 2, 128), (1, 8, 1, 8, 4)),
    ]:
        places = iter(range(batch * width * num_chosen))
        read = set()
        for _ in range(batch * rows):
            read |= {next(places) % num_experts for _ in range(num_chosen)}
        products, dim, inner = batch * width * num_chosen, 16, 32
        shapes = (batch * width, dim), (num_experts, dim, inner), (num_experts,), (products,)
        operands = tuple(Array(shape, 2) for shape in shapes)
        call = Call(operands, (Array((products, inner), 2),), frozenset())
        load = CachedContext(batch, 10, rows, num_chosen)
        others = sum(one.size for one in operands if len(one.shape) != 3)
        weights = len(read) * dim * inner * 2
        assert touched("grouped_matmul", call, load)[0] == weights + others


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
    """Return a made-up report: a kernel per layer, and one kernel in a branch that is not taken."""
    kernels = [launch(f"jit(decode)/verify/{i}") for i in range(num_layers)]
    listed = [{**vars(one), "layer": i} for i, one in enumerate(kernels)]
    listed.append({**vars(launch("jit(decode)/settle/cond")), "branches": [["cond", 1]]})
    found = {"launches": listed, "large_copies": listed[:1], "top_level": ["kCommandBuffer"]}
    found |= {"unknown_loops": [], "uncaptured_conditionals": [], "is_one_command_buffer": True}
    found |= {"memory": {"argument": 1, "output": 9, "alias": 0, "temp": 2, "peak": 3}}
    kernel = resources.Resources("fusion", 255, 8, 16, 24, 0, 0, (4, 1, 1), (32,))
    return found | {"seconds": {"trace": 0.5, "compile": 1.5}, "resources": [vars(kernel)]}


def test_text_and_json_of_a_report(monkeypatch):
    monkeypatch.setattr(report, "compile_functions", lambda *_, **__: [made(2)])
    found = report.compile_step(LLAMA, batch=1, k=0, num_layers=2)
    nothing = dict.fromkeys(("draft", "settle", "observe", "other"), 0)
    assert found.num_launches == {"step": 2, "verify": 2} | nothing
    assert found.verify.moved == found.step.moved == 60
    assert found.layers["full_attention"].minimum == found.layers["full_attention"].maximum == 1
    assert found.state_bytes > 0 and not found.is_state_in_place
    as_dict = json.loads(json.dumps(as_json(found)))
    assert as_dict["verify"]["ratio"] == 60 / found.minimum.verify
    text = "\n".join(as_lines(found))
    assert re.search(r"one command buffer +yes\n", text)
    assert "layers                        2 of 32" in text
    assert "state is updated in place     NO" in text
    assert "255 registers, spills 16 B out, 24 B in, 0 bytes shared, grid 4x1x1" in text


def test_text_and_json_of_several_gpus(monkeypatch):
    one = made(2)
    for layer in 0, None:
        fields = {"kind": "all-reduce", "layer": layer, "num_read": 10 << 10, "times": 2}
        one["launches"].append({**vars(launch("jit(decode)/shard_map/verify/psum")), **fields})
    one |= {"is_one_command_buffer": False, "top_level": ["kCommandBuffer"] * 3 + ["kAllReduce"]}
    monkeypatch.setattr(report, "compile_functions", lambda *_, **__: [one])
    found = report.compile_step(LLAMA, batch=1, k=0, num_layers=2, tensor_parallel_size=4)
    text = "\n".join(as_lines(found))
    for expected in (
        r"launches by the host +4\n",
        r"step +4 all-reduce: 40.0 KiB\n",
        r"of a full_attention layer +2 all-reduce: 20.0 KiB\n",
        r"outside of the target's layers\n +20.0 KiB  all-reduce .* verify/psum\n",
        r"GPUs +4; all figures are of each of them\n",
    ):
        assert re.search(expected, text), (expected, text)
    assert [x["kind"] for x in as_json(found)["collectives"]] == ["all-reduce"] * 2


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
