"""For any body, the server gives an answer, or an error that is the client's fault."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specjax.server.wire import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.slow

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NUMBERS = st.one_of(
    st.integers(-2, 12), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text("aé\n{(*", max_size=6))
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", ""])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": SCALARS},
    optional={"tool_calls": SCALARS | st.lists(SCALARS), "name": SCALARS, "refusal": SCALARS},
)
VALUES = st.recursive(
    SCALARS | MESSAGES,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "text", "json", "regex", "choice", "json_schema", "schema", "7"]),
        inner,
        max_size=3,
    ),
    max_leaves=6,
)
LIKELY = {  # so that many bodies get as far as the engine
    "prompt": st.text("ab ", min_size=1, max_size=9) | st.lists(st.integers(-1, 97), max_size=5),
    "messages": st.lists(MESSAGES, max_size=3),
    "tokens": st.lists(st.integers(-1, 99), max_size=5),
    "max_tokens": st.integers(0, 6),
    "n": st.integers(0, 3),
    "structured_outputs": st.dictionaries(st.sampled_from(["json", "regex", "choice"]), VALUES),
    "stream": st.booleans(),
    "temperature": st.floats(-0.1, 3),
}


@st.composite
def requests(draw):
    """Draw a path, and a body in which some fields have likely or arbitrary values."""
    path = draw(st.sampled_from(sorted(KINDS)))
    fields = KINDS[path].__struct_fields__
    names = draw(st.lists(st.sampled_from([*fields, "unknown"]), max_size=5, unique=True))
    names += [name for name in ("prompt", "messages", "tokens", "max_tokens") if name in fields]
    body = {}
    for name in names:
        likely = LIKELY.get(name, SCALARS)
        body[name] = draw(likely if draw(st.integers(0, 9)) else VALUES)
    return path, body


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests())
def test_no_body_is_the_servers_fault(server, given_request):
    path, body = given_request
    answer = server.post(path, body)
    if answer.status != 200:
        assert answer.error[0] in (400, 404, 422), (body, answer.body)
    elif body.get("stream") is True:
        last = answer.events[-1]
        assert last.get("error", {}).get("code") in (None, 422), (body, last)
    else:
        assert answer.json
