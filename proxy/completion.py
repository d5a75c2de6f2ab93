"""A completion request and its answer as the proxy needs them: parsed once, never re-encoded.

Only the value of `model` is replaced, inside the raw bytes, so what reaches vLLM is what the client sent.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson


class BadRequest(ValueError):
    """The request can't be right, whichever replica gets it."""


@dataclass(slots=True)
class CompletionRequest:
    """`prompt` is the list of token ids where one was sent, else None; `prompt_bytes` identifies it in any case."""

    raw: bytes
    model: str
    model_start: int
    model_end: int
    prompt: list[int] | None
    prompt_bytes: bytes
    digest: bytes
    max_tokens: int
    stream: bool

    def with_model(self, name: str) -> bytes:
        """The same bytes with another model's name."""
        return b"".join((self.raw[: self.model_start], orjson.dumps(name), self.raw[self.model_end :]))


def ids_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers. Raises `OverflowError` or `TypeError` if they are none."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def ids_sha256(ids: Sequence[int]) -> str:
    """The digest by which the journal names a list of token ids."""
    return hashlib.sha256(ids_bytes(ids)).hexdigest()


def parse_request(raw: bytes) -> CompletionRequest:
    """Read a `/v1/completions` body; raises `BadRequest` with what is wrong."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model is missing or empty: name a version of this run, or the base model")
    stream = body.get("stream")
    if not isinstance(stream, bool | None):
        raise BadRequest('stream must be true or false: vLLM would also take 1 or "yes" and answer with events')
    spans = _top_level_spans(raw)
    prompt = body.get("prompt")
    ids, prompt_bytes = None, b""
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        try:
            ids, prompt_bytes = prompt, ids_bytes(prompt)
        except (OverflowError, TypeError) as error:
            raise BadRequest(f"prompt is not a list of token ids: {error}") from error
    elif prompt is not None:
        start, end = spans["prompt"]
        prompt_bytes = raw[start:end]
    start, end = spans["model"]
    return CompletionRequest(
        raw=raw,
        model=model,
        model_start=start,
        model_end=end,
        prompt=ids,
        prompt_bytes=prompt_bytes,
        digest=hashlib.sha256(prompt_bytes).digest(),
        max_tokens=_positive(body.get("max_tokens"), 16) * _positive(body.get("n"), 1),
        stream=stream is True,
    )


def _positive(value: object, default: int) -> int:
    """A count for estimates only; whether it is valid is vLLM's to say."""
    return value if type(value) is int and 0 < value < 1 << 31 else default


_KEY = re.compile(rb'\s*"([^"\\]*)"\s*:\s*')
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\s}\]]+")
_FLAT_ARRAY = re.compile(rb'\[[^\[\]{}"]*\]')
_SEPARATOR = re.compile(rb"\s*([,}])")


def _top_level_spans(raw: bytes) -> dict[str, tuple[int, int]]:
    """Where each value of the top-level object lies in `raw`, which is known to be valid JSON.

    A repeated key is refused at any depth: which of the two a reader takes depends on the reader.
    """
    spans: dict[str, tuple[int, int]] = {}
    position = raw.index(b"{") + 1
    nested = False
    while True:
        key = _KEY.match(raw, position)
        if key is None:
            raise BadRequest("the body has a key that is written with escapes")
        name = key[1].decode()
        if name in spans:
            raise BadRequest(f"the body names {name!r} twice")
        start = key.end()
        lead = raw[start : start + 1]
        if lead == b'"':
            value = _STRING.match(raw, start)
        elif lead == b"[":
            value = _FLAT_ARRAY.match(raw, start)
        elif lead == b"{":
            value = None
        else:
            value = _SCALAR.match(raw, start)
        if value is None:
            nested = True
        end = _end_of_nested(raw, start) if value is None else value.end()
        spans[name] = (start, end)
        separator = _SEPARATOR.match(raw, end)
        if separator is None or separator[1] == b"}":
            break
        position = separator.end()
    if nested:
        _refuse_repeated_keys(raw)
    return spans


_BRACKET_OR_STRING = re.compile(rb'[\[\]{}]|"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _end_of_nested(raw: bytes, start: int) -> int:
    """Where the array or object that begins at `start` ends."""
    depth = 0
    for token in _BRACKET_OR_STRING.finditer(raw, start):
        if token[0] in (b"[", b"{"):
            depth += 1
        elif token[0] in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                return token.end()
    raise BadRequest("the body is not JSON: unbalanced brackets")


def _refuse_repeated_keys(raw: bytes) -> None:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BadRequest("the body names a key twice inside a nested object")
        return found

    try:
        json.loads(raw, object_pairs_hook=check)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error


@dataclass
class CompletionAnswer:
    """What the proxy reads of a 200: is it an answer at all, and what goes in the journal."""

    body: dict[str, Any]

    @cached_property
    def choice(self) -> dict[str, Any] | None:
        choices = self.body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        return first if isinstance(first, dict) else None

    @property
    def output(self) -> list[int] | None:
        ids = self.choice.get("token_ids") if self.choice else None
        return ids if isinstance(ids, list) else None

    @property
    def logprobs(self) -> list[float] | None:
        logprobs = self.choice.get("logprobs") if self.choice else None
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        return values if isinstance(values, list) else None

    @property
    def finish_reason(self) -> str | None:
        reason = self.choice.get("finish_reason") if self.choice else None
        return reason if isinstance(reason, str) else None

    @property
    def usage(self) -> tuple[int, int]:
        """Prompt and completion tokens; 0 where the answer does not say."""
        usage = self.body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))

    def why_useless(self) -> str | None:
        """Why this must be asked of another replica, or None if it is an answer."""
        if self.choice is None:
            return "200 without choices"
        choices = self.body["choices"]
        if any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices):
            return "aborted by the engine"
        return None


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0


def parse_answer(raw: bytes) -> CompletionAnswer | None:
    """The answer, or None if it is not a JSON object (e.g. cut off)."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return CompletionAnswer(body) if isinstance(body, dict) else None
