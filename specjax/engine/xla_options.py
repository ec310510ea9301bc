"""XLA's options for compiling the programs of an engine, by platform."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

GPU_OPTIONS = {
    # No split-K in XLA's own matmuls: it would split most matmuls of a step, and each would need
    # another kernel to sum the parts. cuBLAS, which XLA tries as well, may still use split-K.
    "xla_gpu_experimental_force_split_k": 1,
    # This pass tries to use at most four fifths of the card's memory. Weights and pages take more,
    # so the pass would warn about every program. Nothing in a step is worth recomputing.
    "xla_disable_hlo_passes": "rematerialization",
}
# Operations that may be in CUDA graphs: XLA's default, loops, and collectives of NCCL.
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,COLLECTIVES"
# With this level, compiling takes three quarters of the time. The time of steps is the same
# within noise.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"gpu": GPU_OPTIONS, "cpu": CPU_OPTIONS}
# For programs that no request waits for: XLA generates the same code in one thread instead of many.
OPTIONS_BEHIND: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"xla_cpu_parallel_codegen_split_count": 1}
}


def collective_options(collectives: str) -> dict[str, Any]:
    """Return the options of programs for several GPUs, for a value of `EngineConfig.collectives`.

    With "auto", XLA chooses. Since jax 0.11, it uses its own kernels for small sums over 2, 4 or 8
    GPUs that NVLink connects, and NCCL for everything else. With "nccl", it always uses NCCL.
    Either way, the host launches each collective, and the kernels between two collectives.

    With "graph", XLA uses NCCL inside CUDA graphs, and the host launches a step as one graph. This
    is not the default, because it has been reported that programs hang or take 30 % longer.
    """
    if collectives == "auto":
        return {}
    options: dict[str, Any] = {"xla_gpu_experimental_use_collective_kernels": ""}
    if jax.__version_info__ < (0, 11):
        options = {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False}
    if collectives == "graph":
        options["xla_gpu_enable_command_buffer"] = IN_GRAPHS
    return options


def matmul_precision(dtype: str, platform: str) -> AbstractContextManager:
    """Return a context in which float32 products are computed in float32.

    The context matters only for float32 weights on a GPU: there, JAX by default rounds the factors
    of products to TF32, which has 10 bits. Logits of the same tokens would then differ by 2e-3
    instead of 4e-5 between programs of different shapes. So outputs with and without drafts could
    differ. The context changes nothing for other dtypes and platforms, or if
    `jax_default_matmul_precision` is set.
    """
    is_rounded = platform == "gpu" and dtype == "float32"
    config: Any = jax.config  # type checkers do not know its options
    if is_rounded and config.jax_default_matmul_precision is None:
        return jax.default_matmul_precision("highest")
    return nullcontext()
