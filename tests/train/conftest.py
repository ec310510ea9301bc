"""A small target, documents, and the target's features of the documents."""

from typing import Any

import jax
import numpy as np
import pytest
from support.params import random_params
from support.training import AUX, LENGTH, TARGET, VOCAB

from specjax.train.data import Document
from specjax.train.features import FeatureSet


@pytest.fixture(scope="package")
def target_params() -> Any:
    return jax.device_put(random_params(TARGET.specs(), 0))


@pytest.fixture(scope="package")
def documents() -> list[Document]:
    """Documents with a prompt of four tokens and an answer of sixteen tokens."""
    rng = np.random.default_rng(0)
    return [Document(rng.integers(0, VOCAB, 20).astype(np.int32), 4) for _ in range(12)]


@pytest.fixture(scope="package")
def features(target_params, documents) -> FeatureSet:
    return FeatureSet.of(TARGET, target_params, documents, LENGTH, AUX)
