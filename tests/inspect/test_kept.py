"""Kept functions: which of them are compiled again, and how a wrong one is detected."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
from support.compiled_again import compile_again
from support.seeds import VARIABLE

from specjax.inspect.compile import compile_functions
from specjax.inspect.gpus import GPU
from specjax.inspect.kept import Kept, _code_of, digest_of

CODE = """
import jax, jax.numpy as jnp, numpy as np

def make(constant=1.0, scope="a", at=0):
    @jax.jit
    def f(x):
        with jax.named_scope(scope):
            return x * constant + np.eye(1, 10_000, at, dtype=np.float32)[0]
    return f, (jax.ShapeDtypeStruct((10_000,), jnp.float32),), {}
"""
FIRST = {}
OTHERS = (
    {"arguments": {"constant": 2.0}},
    {"arguments": {"scope": "b"}},  # by which reports tell the parts of a step
    {"arguments": {"at": 5_000}},  # within an array that XLA would not print
    {"options": {"xla_gpu_enable_triton_gemm": False}},
    {"gpu": "h100"},
)

pytestmark = pytest.mark.h200


def test_what_changed_is_compiled_and_what_is_wrong_is_found(kept, tmp_path):
    kept, file = Kept(tmp_path / "kept"), tmp_path / "code.py"

    def compiled(*changes, which=kept, **options):
        requests = [{"function": "make", **one} for one in changes]
        return compile_functions(file, requests, kept=which, **options)

    file.write_text(CODE)
    (first,) = compiled(FIRST)
    file.write_text("# other lines\n" * 3 + CODE)
    again, *others = compiled(FIRST, *OTHERS)
    assert again == first | {"is_kept": True}
    assert not any(one["is_kept"] for one in (first, *others))
    (checked,) = compiled(FIRST, resources=True)
    assert not checked["is_kept"] and checked["resources"]
    every = Kept(kept.folder, recompiles=True)
    (anew,) = compiled(FIRST, which=every)
    assert not anew["is_kept"] and every.num_compiled == 1
    compile_again(kept, seed=0)

    for path in kept.folder.iterdir():
        fields = json.loads(path.read_text())
        fields["memory"]["temp"] += 1
        path.write_text(json.dumps(fields))
    kept.used.clear()
    assert compiled(FIRST)[0]["is_kept"]
    with pytest.raises(AssertionError, match=f"{VARIABLE}=7: .*'memory'"):
        compile_again(kept, seed=7)
    with pytest.raises(RuntimeError, match="has other .'memory'. than .* delete the file"):
        compiled(FIRST, which=every)
    for path in kept.folder.iterdir():
        path.write_text(path.read_text()[:-9])
    with pytest.raises(RuntimeError, match="cannot be read .*delete it"):
        compiled(FIRST)


@pytest.mark.usefixtures("kept")
def test_another_version_is_another_digest(monkeypatch):
    def digest():
        return digest_of("program", GPU.named("h200"), {}, ["flag"])

    before = digest()
    assert digest() == before != digest_of("program", GPU.named("h200"), {}, ["another"])
    package = SimpleNamespace(name="jaxlib", version="0.1")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [package])
    assert digest() != before
    package.name = "jaxtyping"
    without = digest()
    package.version = "0.2"
    assert digest() == without != before


def test_comments_are_not_code(tmp_path):
    file = tmp_path / "kept.py"

    def code(text):
        file.write_text(text)
        return _code_of(file)

    one = code('"""Words."""\ndef f(x):\n    """Words."""\n    return x')
    assert one == code("def f(x):\n    return x  # words") != code("def f(x):\n    return -x")


def test_the_seed_is_stated(seed, record_property):
    record_property(VARIABLE, seed)
