"""Weights in the forms of trainers: torch parameters and similar, buffers, heads, folders."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.engines import SIZES, VOCAB, simulated_engines
from support.params import random_params
from support.refusals import refusal
from support.rollouts import copied, noisy

from specjax.checkpoint.errors import CheckpointError
from specjax.device.drafters.mtp_files import of_own_shape
from specjax.device.models.registry import describe_model, read_config, save_model
from specjax.rl import RolloutEngine, read_weights, weights
from specjax.rl.checksum import checksum
from specjax.rl.named import read_named
from specjax.rl.nnx import PolicyModule, hf_named
from specjax.rl.weights import stage_drafter, stage_target

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def engine(target):
    with simulated_engines(), RolloutEngine(target.folder, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def own(engine):
    return copied(engine.params.target)


FORMS = {
    "parameters": lambda x: torch.nn.Parameter(x),
    "bfloat16": lambda x: torch.nn.Parameter(x.bfloat16()),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.T.contiguous().T if x.ndim == 2 else x,
    "transposed in jax": lambda x: jnp.from_dlpack(x.T.contiguous().T if x.ndim == 2 else x),
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": lambda x: torch._neg_view(x),
    "big endian": lambda x: x.numpy().astype(">f4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_torch(engine, hf, form):
    """Values are the same as after torch's own conversion."""
    given = {name: FORMS[form](x.detach()) for name, x in hf.named_parameters()}
    engine.update_weights(iter(given.items()))
    changed = engine.checksum()
    plain = {}
    for name, x in given.items():
        own = x.detach().float().resolve_neg() if isinstance(x, torch.Tensor) else x
        plain[name] = np.asarray(own).astype(np.float32)
    engine.update_weights(noisy(plain, 1))
    assert engine.checksum() != changed
    engine.update_weights({name: np.ascontiguousarray(x) for name, x in plain.items()})
    assert engine.checksum() == changed


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_buffers_that_are_not_sent_keep_their_values(checkpoints, kind, caplog):
    files = checkpoints.target(kind, vocab_size=VOCAB)
    target = describe_model(read_config(files.folder))
    current = random_params(target.specs(), 0)
    state, given = files.hf.state_dict(), dict(files.hf.named_parameters())
    buffers = sorted(state.keys() - given.keys())
    assert buffers

    def kept(given):
        sources = stage_target(read_named(given, current, "weights"), target, current)
        pairs = zip(jax.tree.leaves(current), sources, strict=True)
        return sum(leaf is source.parts[0] for leaf, source in pairs)

    weights._say_kept.cache_clear()  # a line is said once in a process
    with caplog.at_level(logging.INFO, "specjax"):
        assert kept(given) == len(buffers)
    assert all(name in caplog.text for name in (*buffers, "keep their values", "state_dict()"))
    assert kept(state) == 0
    lost = next(name for name in given if "mlp.gate.weight" in name)
    del given[lost]
    assert buffers[0] not in refusal(lambda: kept(given), "missing", lost)


def test_buffers_of_the_targets_module_keep_their_values(checkpoints):
    folder = checkpoints.target("deepseek_v3", vocab_size=VOCAB).folder
    module = of_own_shape(describe_model(read_config(folder)), "target")
    specs, mine = jax.tree.leaves(module.specs()), random_params(module.specs(), 1)
    tensors = {
        name: np.zeros(shape, np.float32)
        for spec in specs
        if not spec.is_buffer
        for name, shape in zip(spec.names, spec.file_shapes, strict=True)
    }
    sources = stage_drafter(tensors, module.drafter(False), mine)
    for source, leaf, spec in zip(sources, jax.tree.leaves(mine), specs, strict=True):
        assert (source.parts[0] is leaf) == spec.is_buffer
    assert any(spec.is_buffer for spec in specs)


def test_heads_that_one_side_ties(checkpoints, engine, hf):
    tied = checkpoints.target("llama", vocab_size=VOCAB, tie_word_embeddings=True)
    given = dict(tied.hf.named_parameters())
    assert "lm_head.weight" not in given
    target = describe_model(read_config(tied.folder))
    current = random_params(target.specs(), 0)

    def stage(given):
        return stage_target(read_named(given, current, "weights"), target, current)

    assert len(stage(given)) == len(stage(tied.hf.state_dict())) == len(jax.tree.leaves(current))
    other = given | {"lm_head.weight": given["model.embed_tokens.weight"] * 1.5}
    refusal(lambda: stage(other), "lm_head.weight that differs", "tie_word_embeddings=false")
    own_head = dict(hf.named_parameters())
    del own_head["lm_head.weight"]
    refusal(lambda: engine.update_weights(own_head), "missing: lm_head", "under both names")


def save(kind, folder, engine, params, source):
    """Save weights as trainers do; return their folder."""
    state = nnx.state(PolicyModule(engine.target, params), nnx.Param)
    if kind == "hugging face":
        save_model(folder, engine.target, params, source)
    elif kind == "standard":
        with ocp.StandardCheckpointer() as saver:
            saver.save(folder, state)
    elif kind == "step":
        with ocp.CheckpointManager(folder) as steps:
            steps.save(3, args=ocp.args.StandardSave(state))
        return folder / "3"
    else:
        save_orbax(folder, params if kind == "engine's tree" else state)
    return folder


def save_orbax(folder, tree):
    ocp.PyTreeCheckpointer().save(folder, tree)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hugging face", "engine's tree", "state", "standard", "step"])
def test_weights_in_a_folder(engine, own, target, tmp_path, kind):
    params = noisy(own, 5)
    folder = save(kind, tmp_path / "saved", engine, params, target.folder)
    for path in (folder, str(folder)):
        engine.update_weights(own)
        engine.update_weights(path)
        assert engine.checksum() == checksum(params)


def test_a_part_of_a_folder(tmp_path):
    """The folder has the training state of a trainer's own model, and parameters are a part."""
    state = {"params": {"q": {"value": np.ones((2, 3), np.float32)}}, "opt": (np.zeros(2),)}
    folder = save_orbax(tmp_path / "saved", state)
    found = read_weights(folder, under="params")
    assert list(found) == ["q.value"]
    ((name, tensor),) = hf_named(found, {"q": "q.weight"})
    assert name == "q.weight" and tensor.tolist() == np.ones((2, 3)).tolist()
    with pytest.raises(CheckpointError, match="nothing under 'model'; .* are opt, params"):
        read_weights(folder, under="model")
    save_orbax(tmp_path / "other", state)
    with pytest.raises(CheckpointError, match=r"several checkpoints \(other, saved\)"):
        read_weights(tmp_path)


def test_folders_that_do_not_fit_change_nothing(engine, own, target, tmp_path):
    engine.update_weights(own)
    before, version = engine.checksum(), engine.version

    def refused(folder, *words):
        refusal(lambda: engine.update_weights(folder), *words)
        assert engine.checksum() == before and engine.version == version

    refused(tmp_path / "absent", "no such folder", "absent")
    refused("runs/step-3", "no such folder", "runs/step-3")  # not looked for on the hub
    refused(tmp_path, "has no weights")
    (file,) = target.folder.glob("*.safetensors")
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(file.read_bytes()[:-8])
    refused(tmp_path, "damaged")
    names = load_file(file)
    lora = {f"base_model.model.{name}": x for name, x in names.items()}
    refused(save_orbax(tmp_path / "lora", lora), "base_model.model", "merge_and_unload()")
