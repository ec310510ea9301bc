"""The descriptions of GPUs, compared with nvidia-smi and ptxas."""

import re

import pytest

from specjax.inspect.gpus import GPU, GPUS

REPORTED = {"h100": (81559, "sm_90a"), "h200": (143771, "sm_90a")}  # MiB by nvidia-smi


@pytest.mark.parametrize("name", GPUS)
def test_memory_and_architecture(name):
    gpu = GPU.named(name)
    assert (gpu.memory_bytes / 2**20, gpu.architecture) == REPORTED[name]


def test_a_file_says_no_field_twice():
    """A second line for a field would silently replace the first, or make XLA fail."""
    for name in GPUS:
        fields = re.findall(r"^ *(\w+): ", GPU.named(name).target_config, re.MULTILINE)
        assert len(fields) == len(set(fields))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'b200' is not a known target; choose one of h100, h200"):
        GPU.named("b200")
