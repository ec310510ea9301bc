"""/openapi.json has every endpoint, and its schemas accept what the server accepts."""

import jsonschema
import pytest
from support.http import served

from specjax.server.app import ROUTES
from specjax.server.rl_doors import RL_ROUTES

COMPLETIONS, UPDATE = "/v1/completions", "/update_weights"


@pytest.fixture(scope="module")
def described(simulated):
    with served(simulated, rl=True) as server:
        yield server.get("/openapi.json").json


def test_every_endpoint_is_described(described, server):
    found = {(path, method) for path, made in described["paths"].items() for method in made}
    routes = [*ROUTES, *RL_ROUTES]
    methods = {(one.path_format, method.lower()) for one in routes for method in one.methods}
    assert found == {one for one in methods if one[1] != "head"}
    plain = server.get("/openapi.json").json["paths"]
    assert COMPLETIONS in plain and UPDATE not in plain  # it has no --rl
    posts = [made["post"] for made in described["paths"].values() if "post" in made]
    assert sum("requestBody" in one for one in posts) == 8
    names = {one["name"] for one in described["paths"]["/sleep"]["post"]["parameters"]}
    assert names == {"level", "mode"}


@pytest.mark.parametrize("body", [
    {"prompt": "a", "max_tokens": 2, "stop": ["x"], "temperature": None},
    {"prompt": [[1], [2]], "max_tokens": 2, "unknown": {}},
    {"prompt": "a", "max_tokens": "2"},
    {"prompt": "a", "stop": [1]},
    {"max_tokens": 2},
], ids=str)  # fmt: skip
def test_a_schema_agrees_with_the_server(described, server, body):
    content = described["paths"][COMPLETIONS]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"] | {"components": described["components"]}
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(body)
    assert (server.post(COMPLETIONS, body).status == 200) == is_valid
