"""Whole decode steps of real models, compiled for an H200: launches, bytes and copies.

The limits may only fall. On a GPU, XLA's tuner chooses between its own matmuls and cuBLAS, so both
are compiled. Every case has XLA's matmuls, which are fused with other operations. One case of each
kind of layer has cuBLAS, which changes only copies and launches next to products. Contexts have
2,048 tokens, and bytes are those of all kernels' operands.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from specjax.engine.variants import FEW_LOGPROBS
from specjax.inspect.report import GEMMS, StepRequest, compile_steps, part_of

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
SHARED_MEMORY = 227 * 1024
MAX_SETTLING = 6  # launches from logits to tokens and the state

pytestmark = pytest.mark.h200


@dataclass(frozen=True)
class Case:
    """A step, and its limits."""

    model: str
    batch: int
    k: int
    most_kernels: tuple[tuple[str, int], ...]  # by kind of layer
    most_bytes: float  # of the forward pass, to weights, keys and values, and states read once
    num_layers: int | None = None
    with_cublas: bool = False  # too

    @property
    def method(self):
        return "eagle" if self.model == LLAMA else "mtp"


ATTENTION, DELTA, LATENT = "full_attention", "linear_attention", "latent_attention"
LLAMA, GLM = "Llama-3.1-8B", "GLM-4.7-Flash"
CASES = [
    # norm, qkv, rotation, attention, its splits, out, norm, gate and up, silu, down
    # (Of eight layers the logits are a larger part.)
    Case(LLAMA, 1, 3, ((ATTENTION, 10),), 1.015, 8, True),
    # without splits; the last with all layers
    Case(LLAMA, 64, 0, ((ATTENTION, 9),), 1.05, num_layers=8),
    Case(LLAMA, 64, 3, ((ATTENTION, 9),), 1.10),
    # norm, in, the rule and its norm, out, norm, gate and up, silu, down; attention with a gate.
    # The rule is two launches: what its new tokens need is prepared once. What a step keeps of them
    # for the next one, in f32, is 0.4 % of the 27B's bytes.
    Case("Qwen3.5-4B", 1, 3, ((DELTA, 10), (ATTENTION, 11)), 1.015, num_layers=8),
    Case("Qwen3.5-4B", 32, 3, ((DELTA, 10), (ATTENTION, 10)), 1.12, 8, True),
    Case("Qwen3.5-27B", 16, 3, ((DELTA, 10), (ATTENTION, 11)), 1.045, num_layers=8),
    # norm, down, latent's norm and rotation, its write, queries' norm and up, keys absorbed, joined
    # with the rotated part, attention, its splits, values up, out, norm; then the router, the
    # choice (of many rows in six), two products of experts with SwiGLU between, the shared expert
    # in two or three, the sum; cuBLAS has some copied.
    Case(GLM, 1, 3, ((LATENT, 22),), 1.04, num_layers=4),
    Case(GLM, 64, 3, ((LATENT, 30),), 1.13, 4, True),
]
GEMM_CASES = {"triton": CASES, "cublas": [case for case in CASES if case.with_cublas]}
assert GEMM_CASES.keys() == GEMMS.keys()


@pytest.fixture(scope="class")
def reports(request, kept):
    """Reports by case, with the matmuls of a test class."""
    gemm = request.cls.gemm
    requests = [
        StepRequest(
            model=CONFIGS / case.model,
            batch=case.batch,
            k=case.k,
            gemm=gemm,
            method=case.method,
            num_layers=case.num_layers,
        )
        for case in GEMM_CASES[gemm]
    ]
    made = compile_steps(requests, resources=True, kept=kept)
    return dict(zip(GEMM_CASES[gemm], made, strict=True))


class StepTests:
    """Tests of every case. Each subclass uses other matmuls, and may run in another worker."""

    def test_it_is_one_command_buffer_with_few_launches(self, reports, case):
        report = reports[case]
        assert report.is_one_command_buffer, report.top_level
        assert not report.unknown_loops and not report.uncaptured_conditionals
        for kind, most in case.most_kernels:
            kernels = [(one.kind, one.pallas or one.source) for one in report.layers[kind].kernels]
            assert report.layers[kind].maximum <= most, kernels
        defers = report.observed_later is not None  # then it keeps features instead of observing
        assert report.num_launches["settle"] <= MAX_SETTLING + defers
        assert not (defers and report.num_launches["observe"])

    def test_the_state_is_updated_in_place_and_nothing_large_is_copied(self, reports, case):
        report = reports[case]
        assert report.is_state_in_place and not report.large_copies
        # Tokens, and room for their log-probabilities.
        most = 4 * case.batch * (case.k + 1) * (3 + 2 * FEW_LOGPROBS) + 2**12
        assert report.memory["output"] - report.memory["alias"] < most

    def test_bytes_are_few_and_kernels_fit(self, reports, case):
        """The kernels are ours and XLA's."""
        assert 1 <= reports[case].verify.ratio <= case.most_bytes
        for kernel in reports[case].resources:
            assert not kernel.spills and kernel.shared_bytes <= SHARED_MEMORY, kernel

    def test_parts_add_up(self, reports, case):
        """With an untied output head, the target has one product with it, each draft another."""
        report = reports[case]
        counts = dict(report.num_launches)
        assert counts.pop("step") == sum(counts.values()) == sum(x.times for x in report.taken)
        assert (counts["draft"] > 10) == (case.k > 0)
        products = [one for one in report.taken if one.kind == "gemm"]
        heads = [one for one in products if "params.target.lm_head" in one.parameters]
        if case.model == LLAMA:
            assert [part_of(one) for one in heads] == ["draft"] * case.k + ["verify"]


@pytest.mark.parametrize("case", GEMM_CASES["triton"], ids=str)
class TestTritonMatmuls(StepTests):
    gemm = "triton"


@pytest.mark.parametrize("case", GEMM_CASES["cublas"], ids=str)
class TestCublasMatmuls(StepTests):
    gemm = "cublas"
