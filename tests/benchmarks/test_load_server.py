"""A short load test of the server, on a simulated device."""

import importlib
import json
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("uvicorn") is None, reason="needs the extra serve")
def test_a_short_load_has_no_faults(tmp_path, monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    load, path = importlib.import_module("load_server"), tmp_path / "result.json"
    arguments = ["--seconds=4", "--clients=24", "--device=simulated", f"--json={path}"]
    assert load.main(arguments) == 0
    for table in json.loads(path.read_text())["tables"]:
        found = dict(table["rows"])
        assert all(found[f"requests: {way}"] for way in ("finished", "left", "refused"))
    assert found["preemptions"] > 0
