"""Xorbs and shards written by hand, for tests that need one that is wrong in a chosen way."""

import struct
from collections.abc import Sequence

import lz4.frame
import numpy as np
from blake3 import blake3

from bucket_grpo.emulator.cas import (
    BOOKEND,
    HAS_VERIFICATION,
    RANGE_KEY,
    Chunk,
    Term,
    chunk_digest,
    file_hash,
    hash_name,
    tree_digest,
)

SHARD_TAG = b"HFRepoMetaData\x00" + bytes(
    [85, 105, 103, 69, 106, 123, 129, 87, 131, 165, 189, 217, 92, 205, 209, 74, 169]
)


def digest_of(name: str) -> bytes:
    """The digest whose name this is."""
    return b"".join(struct.pack("<Q", int(name[i : i + 16], 16)) for i in range(0, 64, 16))


def group_by_four(content: bytes) -> bytes:
    flat = np.frombuffer(content, dtype=np.uint8)
    return b"".join(flat[lane::4].tobytes() for lane in range(4))


def pack_chunk(content: bytes, scheme: int = 0) -> bytes:
    body = {
        0: lambda: content,
        1: lambda: lz4.frame.compress(content),
        2: lambda: lz4.frame.compress(group_by_four(content)),
    }[scheme]()
    return bytes([0]) + len(body).to_bytes(3, "little") + bytes([scheme]) + len(content).to_bytes(3, "little") + body


def chunks_of(contents: Sequence[bytes], scheme: int = 0) -> list[Chunk]:
    chunks, offset = [], 0
    for content in contents:
        chunks.append(Chunk(chunk_digest(content), offset, len(content)))
        offset += len(pack_chunk(content, scheme))
    return chunks


def pack_xorb(contents: Sequence[bytes], scheme: int = 0) -> tuple[str, bytes]:
    """A xorb's name and bytes."""
    name = hash_name(tree_digest([(chunk_digest(content), len(content)) for content in contents]))
    return name, b"".join(pack_chunk(content, scheme) for content in contents)


def pack_shard(files: Sequence[tuple[str, Sequence[Term], Sequence[bytes]]]) -> bytes:
    """A shard of files, each given as its hash, its terms, and a proof per term (or none)."""
    out = SHARD_TAG.ljust(32, b"\0") + struct.pack("<QQ", 2, 0)
    for name, terms, proofs in files:
        out += digest_of(name) + struct.pack("<IIQ", HAS_VERIFICATION if proofs else 0, len(terms), 0)
        for term in terms:
            out += digest_of(term.xorb) + struct.pack("<IIII", 0, term.size, term.first, term.last)
        out += b"".join(proof + bytes(16) for proof in proofs)
    return out + BOOKEND + bytes(16) + BOOKEND + bytes(16)


def proof_of(chunks: Sequence[Chunk]) -> bytes:
    return blake3(b"".join(chunk.digest for chunk in chunks), key=RANGE_KEY).digest()


def pack_file(contents: Sequence[bytes], scheme: int = 0) -> tuple[str, tuple[str, bytes], bytes]:
    """One file in one xorb: the file's hash, the xorb's name and bytes, and the shard that declares the file."""
    xorb, data = pack_xorb(contents, scheme)
    chunks = chunks_of(contents, scheme)
    name = file_hash(chunks)
    term = Term(xorb, 0, len(contents), sum(map(len, contents)))
    return name, (xorb, data), pack_shard([(name, [term], [proof_of(chunks)])])
