"""How often choosing tokens reads and writes the logits, as XLA compiles it for an H200.

Logits of 256 rows over 151,936 tokens are 78 MB in bf16 and 156 MB in fp32. Greedy decoding needs
two passes over them: the head's matmul writes them, the argmax reads them. What hlo.py counts.
"""

import jax
import jax.numpy as jnp
import pytest

ROWS, DIM, VOCAB = 64 * (3 + 1), 1024, 151_936
GEMMS = {"triton": True, "cublas": False}

pytestmark = pytest.mark.h200


def head_bf16_or_f32(hidden, head):
    """Logits of the head's dtype."""
    return hidden @ head


def head_cast(hidden, head):
    """fp32 logits by a conversion of the head's."""
    return (hidden @ head).astype(jnp.float32)


def head_f32(hidden, head):
    """fp32 logits as the matmul accumulated them."""
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def argmax(logits):
    return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)


def perturbed(logits, temperature, seeds):
    noise = jax.vmap(lambda seed: jax.random.gumbel(jax.random.key(seed), (VOCAB,)))(seeds)
    is_greedy = (temperature == 0)[:, None]
    scaled = logits.astype(jnp.float32) / jnp.where(is_greedy, 1.0, temperature[:, None])
    return jnp.where(is_greedy, logits, scaled + noise)


def greedy(logits, temperature, seeds):
    return argmax(logits)


def choose_scores(logits, temperature, seeds):
    """The branches return logits; one of them is the identity."""

    def draw(logits):
        return perturbed(logits, temperature, seeds)

    return argmax(jax.lax.cond((temperature > 0).any(), draw, lambda x: x, logits))


def choose_tokens(logits, temperature, seeds):
    """The branches return tokens."""

    def draw(logits):
        return argmax(perturbed(logits, temperature, seeds))

    return jax.lax.cond((temperature > 0).any(), draw, argmax, logits)


def program(head, choose, dtype):
    """For compile.py: functions of this file by name, and the dtype of the weights."""
    to_logits, to_tokens = globals()[head], globals()[choose]

    @jax.jit
    def step(hidden, weights, temperature, seeds):
        return to_tokens(to_logits(hidden, weights), temperature, seeds)

    args = (
        jax.ShapeDtypeStruct((ROWS, DIM), dtype),
        jax.ShapeDtypeStruct((DIM, VOCAB), dtype),
        jax.ShapeDtypeStruct((ROWS,), jnp.float32),
        jax.ShapeDtypeStruct((ROWS,), jnp.uint32),
    )
    return step, args, {}


# Passes of a greedy batch and of one that draws; they are the same with either matmul.
CASES = [
    ("head_cast", "greedy", "bfloat16", [2, 2]),
    ("head_cast", "greedy", "float32", [2, 2]),
    # XLA copies the logits where a branch returns them as they are.
    ("head_cast", "choose_scores", "float32", [4, 4]),
    # A conversion stays outside the conditional, which takes its operands ready made.
    ("head_cast", "choose_scores", "bfloat16", [6, 6]),
    ("head_cast", "choose_tokens", "bfloat16", [4, 4]),
    ("head_cast", "choose_tokens", "float32", [2, 2]),
    ("head_f32", "choose_tokens", "bfloat16", [2, 2]),
    ("head_bf16_or_f32", "choose_tokens", "bfloat16", [2, 2]),
]


@pytest.fixture(scope="module")
def reports(compile_for_h200):
    """Reports by matmul, head, choice and dtype."""
    requests = {
        (gemm, *names): {
            "function": "program",
            "arguments": dict(zip(("head", "choose", "dtype"), names, strict=True)),
            "options": {
                "xla_gpu_enable_triton_gemm": GEMMS[gemm],
                "xla_gpu_graph_min_graph_size": 1,  # of few thunks XLA would make no graph
            },
            "passes_over": {"num_elements": ROWS * VOCAB, "columns": VOCAB},
        }
        for gemm in GEMMS
        for *names, _ in CASES
    }
    return dict(zip(requests, compile_for_h200(__file__, list(requests.values())), strict=True))


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("head, choose, dtype, expected", CASES)
def test_passes_over_the_logits(reports, gemm, head, choose, dtype, expected):
    report = reports[gemm, head, choose, dtype]
    assert report["num_passes"] == expected
    assert [one["access"] for one in report["passes"] if not one["branches"]][0] == "write"


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("head, choose, dtype, expected", CASES)
def test_all_of_it_is_one_cuda_graph(reports, gemm, head, choose, dtype, expected):
    report = reports[gemm, head, choose, dtype]
    assert report["is_one_command_buffer"]
    assert report["uncaptured_conditionals"] == []
    kinds = {thunk["kind"] for thunk in report["thunks"]}
    assert ("kConditional" in kinds) == (choose != "greedy")
    assert ("kCublasLtMatmul" in kinds) == (gemm == "cublas")


def test_the_passes_are_of_these_kernels(reports):
    passes = reports["cublas", "head_cast", "choose_scores", "float32"]["passes"]
    logits = f"f32[{ROWS},{VOCAB}]"
    assert {one["shape"] for one in passes} == {logits}
    assert {one["num_bytes"] for one in passes} == {4 * ROWS * VOCAB}
    by_branch = {}
    for one in passes:
        by_branch.setdefault(tuple(branch for _, branch in one["branches"]), []).append(one)
    assert [one["access"] for one in by_branch[()]] == ["write", "read"]  # matmul, argmax
    assert [one["access"] for one in by_branch[0,]] == ["read", "write"]  # the copy
    assert [one["access"] for one in by_branch[1,]] == ["read", "write"]
    assert {one["kernel"].partition(".")[0] for one in by_branch[0,]} == {"copy"}
    assert all("branch_1_fun" in one["source"] for one in by_branch[1,])
