"""Reading and writing safetensors by hand, strictly: no torch, no copy of the body, nothing left unchecked.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes header length (little-endian), JSON header, body.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MAX_HEADER_BYTES = 64 * 1024 * 1024
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class MalformedFile(ValueError):
    """The bytes are not a complete, canonical safetensors file."""


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the index. `start` and `end` are byte offsets in the body."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsFile:
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    body: memoryview


def parse(data: bytes | memoryview) -> SafetensorsFile:
    """Split a whole file into metadata, index and body; raises `MalformedFile` for anything but an exact fit."""
    view = memoryview(data)
    if len(view) < 8:
        raise MalformedFile(f"the file has {len(view)} bytes, too few for a header")
    (header_bytes,) = struct.unpack("<Q", view[:8])
    if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > len(view):
        raise MalformedFile(
            f"the header claims {header_bytes} bytes; the file has {len(view)}: truncated or not safetensors"
        )
    header = _header_object(bytes(view[8 : 8 + header_bytes]))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedFile("__metadata__ is not a map of strings")
    body = view[8 + header_bytes :]
    tensors = {name: _tensor_info(name, entry) for name, entry in header.items()}
    _check_cover(tensors, len(body))
    return SafetensorsFile(metadata=metadata, tensors=tensors, body=body)


def header_for(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> bytes:
    """The bytes before the body; the same metadata and index always give the same bytes."""
    header = {"__metadata__": dict(metadata), **index_as_json(tensors)}
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def index_as_json(tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    return {
        name: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.start, info.end]}
        for name, info in tensors.items()
    }


def canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def all_finite(info: TensorInfo, body: memoryview) -> bool:
    """Whether no value of a tensor is NaN or infinite."""
    raw = body[info.start : info.end]
    if info.dtype == "BF16":
        exponent = np.uint16(0x7F80)
        return not bool(np.any((np.frombuffer(raw, "<u2") & exponent) == exponent))
    return bool(np.isfinite(np.frombuffer(raw, "<f4" if info.dtype == "F32" else "<f2")).all())


def _header_object(text: bytes) -> dict:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise MalformedFile(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise MalformedFile("the header is not a JSON object")
    return header


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise MalformedFile("the header names a key twice")
    return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(name: str, entry: object) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise MalformedFile(f"tensor {name!r}: the index entry is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise MalformedFile(f"tensor {name!r}: dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise MalformedFile(f"tensor {name!r}: shape {shape!r} is not a list of counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise MalformedFile(f"tensor {name!r}: data_offsets {offsets!r} are not two counts")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise MalformedFile(f"tensor {name!r}: {end - start} bytes do not hold {dtype}{shape}")
    return TensorInfo(dtype=dtype, shape=tuple(shape), start=start, end=end)


def _check_cover(tensors: Mapping[str, TensorInfo], body_bytes: int) -> None:
    """Tensors must tile the body: no hole, no overlap, nothing behind the last."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            raise MalformedFile(f"tensor {name!r} starts at {info.start}, expected {position}")
        position = info.end
    if position != body_bytes:
        raise MalformedFile(
            f"the index needs a body of {position} bytes, the file has {body_bytes}: truncated or padded"
        )
