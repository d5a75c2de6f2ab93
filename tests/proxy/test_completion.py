"""Reading a request: only what can be read in one way gets through, and nothing but the model's name is changed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_grpo.proxy.completion import BadRequest, ids_sha256, parse_answer, parse_request


def test_trls_body_is_read() -> None:
    request = parse_request(b'{"model": "trl-policy-v3", "prompt": [1, 2, 70000], "max_tokens": 64, "seed": 1, "n": 2}')
    assert (request.model, request.prompt, request.max_tokens, request.stream) == (
        "trl-policy-v3",
        [1, 2, 70000],
        128,
        False,
    )
    assert request.digest.hex() == ids_sha256([1, 2, 70000])


def test_only_the_value_of_model_is_replaced() -> None:
    raw = b'{"prompt":"say \\"model\\": \\"x\\"", "model" :\t"tiny" ,"user":{"model":"tiny"}, "stop":["model", "]"]}'
    assert parse_request(raw).with_model('a"b') == raw.replace(b'\t"tiny"', b'\t"a\\"b"')


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'"text"',
        b"{}",
        b'{"prompt": [1]}',
        b'{"model": null, "prompt": [1]}',
        b'{"model": "", "prompt": [1]}',
        b'{"model": 1, "prompt": [1]}',
        b'{"model": ["tiny"], "prompt": [1]}',
        b'{"model": "tiny", "model": "tiny"}',
        b'{"model": "tiny", "prompt": [1], "model": null}',
        b'{"model": "tiny", "\\u006dodel": "other"}',
        b'{"\\u006dodel": "tiny"}',
        b'{"model": "tiny", "a": {"b": 1, "b": 2}}',
        b'{"model": "tiny", "a": [[{"b": 1, "b": 2}]]}',
        b'{"model": "tiny", "prompt": [1, "x"]}',
        b'{"model": "tiny", "prompt": [1, -1]}',
        b'{"model": "tiny", "prompt": [1, 4294967296]}',
        b'{"model": "tiny", "prompt": [1, 2.5]}',
        b'{"model": "tiny", "stream": 1}',
        b'{"model": "tiny", "stream": "true"}',
        b'{"model": "tiny"} trailing',
        b'{"model": "\xff"}',
        b'{"model": "tiny", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_vllm_might_read_in_another_way_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_request(raw)


@pytest.mark.parametrize("prompt", ['"text"', "[[1, 2], [3]]", '["a", "b"]', "null", "[]", "true", "{}"])
def test_other_kinds_of_prompt_are_vllms_to_judge(prompt: str) -> None:
    request = parse_request(f'{{"model": "tiny", "prompt": {prompt}}}'.encode())
    assert request.prompt is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=6) | st.sampled_from(["prompt", "n", "max_tokens", "stream"]), JSON, max_size=6),
    st.text(min_size=1, max_size=6),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=400, deadline=None)
def test_any_body_keeps_all_but_its_model(body: dict, model: str, indent: int | None, ascii_only: bool, order) -> None:
    members = [*{key: value for key, value in body.items() if key != "model"}.items(), ("model", model)]
    order.shuffle(members)
    raw = json.dumps(dict(members), indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        request = parse_request(raw)
    except BadRequest:
        escaped = any(json.dumps(key, ensure_ascii=ascii_only)[1:-1] != key for key, _ in members)
        prompt = body.get("prompt")
        odd_stream = not isinstance(body.get("stream"), bool | None)
        odd_prompt = isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int
        not_utf8 = b"\\ud" in raw.lower() or b"\xed" in raw
        assert escaped or odd_prompt or odd_stream or not_utf8
        return
    assert request.model == model
    assert json.loads(request.with_model("other")) == {**dict(members), "model": "other"}


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ modelnu1.-e', max_size=60).map(str.encode))
@settings(max_examples=600, deadline=None)
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        request = parse_request(raw)
    except BadRequest:
        return
    assert json.loads(raw)["model"] == request.model


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"choices": null}',
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": [{"finish_reason": "abort"}]}',
        b'{"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}',
    ],
)
def test_a_200_that_is_no_answer_is_noticed(raw: bytes) -> None:
    answer = parse_answer(raw)
    assert answer is not None
    assert answer.why_useless()


@given(st.dictionaries(st.sampled_from(["choices", "usage"]), JSON))
@settings(deadline=None)
def test_any_answer_can_be_looked_at(body: dict) -> None:
    answer = parse_answer(json.dumps(body).encode())
    if answer is not None:
        assert answer.why_useless() or answer.choice is not None
        assert all(count >= 0 for count in answer.usage)
        assert answer.output is None or isinstance(answer.output, list)
