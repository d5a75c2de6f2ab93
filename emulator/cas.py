"""The xet formats behind every upload: chunks packed in xorbs, and shards that say which chunks make up a file.

Pure functions over bytes. They check what the real content-addressable store promises: a xorb hashes to its name, and
a shard speaks only of xorbs that are there and of files whose chunks hash to the file's name. The layouts and keys are
those of the published format (xet-core) as the released client `hf_xet` 1.8 writes it; `tests/emulator/test_cas.py`
pins them with that client.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import lz4.frame
import numpy as np
from blake3 import blake3

CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
RANGE_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
FILE_SALT = bytes(32)

XORB_FOOTER = b"XETBLOB"
CHUNK_HEADER = 8
MAX_CHUNK = 128 * 1024
MAX_XORB = 64 * 1024 * 1024
SHARD_HEADER = 48
SHARD_ENTRY = 48
BOOKEND = b"\xff" * 32
HAS_VERIFICATION, HAS_METADATA = 1 << 31, 1 << 30

EMPTY_FILE = "0" * 64
"""The hash of a file of no bytes: it has no chunks, and no shard mentions it."""


class CasRefusal(ValueError):
    """Bytes that the store will not take: malformed, or not what their name says."""


class Chunk(NamedTuple):
    """One chunk of a xorb: its digest, where its header starts in the xorb, and its length when unpacked (bytes)."""

    digest: bytes
    offset: int
    size: int


class Term(NamedTuple):
    """Chunks `[first, last)` of one xorb, as a stretch of a file; `size` is the stretch's length in bytes."""

    xorb: str
    first: int
    last: int
    size: int


@dataclass(frozen=True)
class FileEntry:
    """What a shard says of one file. `range_digests` has a proof per term, or none where the shard gave none."""

    hash: str
    terms: tuple[Term, ...]
    range_digests: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(term.size for term in self.terms)


def hash_name(digest: bytes) -> str:
    """The name of a digest: four little-endian 64-bit words, each printed as a number."""
    return "".join(f"{int(word):016x}" for word in np.frombuffer(digest, dtype="<u8"))


def chunk_digest(data: bytes) -> bytes:
    return blake3(data, key=CHUNK_KEY).digest()


def tree_digest(nodes: Sequence[tuple[bytes, int]]) -> bytes:
    """The digest over `(digest, size)` nodes, merged in groups of 2 to 9 until one is left; zeros for no nodes."""
    if not nodes:
        return bytes(32)
    level = list(nodes)
    while len(level) > 1:
        level = [_merge(group) for group in _groups(level)]
    return level[0][0]


def file_hash(chunks: Sequence[Chunk]) -> str:
    if not chunks:
        return EMPTY_FILE
    root = tree_digest([(chunk.digest, chunk.size) for chunk in chunks])
    return hash_name(blake3(root, key=FILE_SALT).digest())


def _groups(nodes: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    start = 0
    while start < len(nodes):
        end = min(start + 9, len(nodes))
        for i in range(start + 2, end):
            # The last 64-bit word of a digest decides where a group ends.
            if int.from_bytes(nodes[i][0][24:], "little") % 4 == 0:
                end = i + 1
                break
        yield nodes[start:end]
        start = end


def _merge(group: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    text = "".join(f"{hash_name(digest)} : {size}\n" for digest, size in group)
    return blake3(text.encode(), key=NODE_KEY).digest(), sum(size for _, size in group)


def read_xorb(data: bytes, name: str) -> list[Chunk]:
    """The chunks of a xorb, each unpacked and hashed. `CasRefusal` where the content is not what `name` says."""
    if len(data) > MAX_XORB + (1 << 20):
        raise CasRefusal(f"xorb {name[:16]}… has {len(data)} bytes, more than {MAX_XORB}")
    chunks = []
    for offset, end in pairwise(_chunk_bounds(data)):
        content = unpack_chunk(memoryview(data)[offset:end])
        chunks.append(Chunk(chunk_digest(content), offset, len(content)))
    found = hash_name(tree_digest([(chunk.digest, chunk.size) for chunk in chunks]))
    if not chunks or found != name:
        raise CasRefusal(f"xorb {name[:16]}… holds {len(chunks)} chunks that hash to {found[:16]}…")
    return chunks


def _chunk_bounds(data: bytes) -> list[int]:
    bounds = [0]
    while bounds[-1] < len(data):
        at = bounds[-1]
        if data[at : at + len(XORB_FOOTER)] == XORB_FOOTER:
            break
        end = at + CHUNK_HEADER + int.from_bytes(data[at + 1 : at + 4], "little")
        if end > len(data):
            raise CasRefusal(f"xorb is truncated: a chunk at byte {at} ends at {end} of {len(data)}")
        bounds.append(end)
    return bounds


def unpack_chunk(packed: memoryview) -> bytes:
    """One chunk, header included, as it stands in a xorb → its content."""
    version, scheme = packed[0], packed[4]
    size = int.from_bytes(packed[5:8], "little")
    body = packed[CHUNK_HEADER:]
    if version != 0 or size > MAX_CHUNK or scheme not in (0, 1, 2):
        raise CasRefusal(f"chunk header is not of this format: version {version}, scheme {scheme}, {size} bytes")
    try:
        content = bytes(body) if scheme == 0 else lz4.frame.decompress(body)
    except RuntimeError as error:
        raise CasRefusal(f"chunk does not unpack: {error}") from error
    if scheme == 2:
        content = _ungroup_by_four(content)
    if len(content) != size:
        raise CasRefusal(f"chunk unpacks to {len(content)} bytes, its header says {size}")
    return content


def _ungroup_by_four(grouped: bytes) -> bytes:
    """Undo the client's byte grouping: all first bytes of each 4-byte word, then all second ones, and so on."""
    flat = np.frombuffer(grouped, dtype=np.uint8)
    out = np.empty_like(flat)
    start = 0
    for lane in range(4):
        length = len(out[lane::4])
        out[lane::4] = flat[start : start + length]
        start += length
    return out.tobytes()


def read_shard(data: bytes) -> list[FileEntry]:
    """The files that a shard declares. Only its first section counts: the rest is the client's own index."""
    files = []
    at = SHARD_HEADER
    if data[:14] != b"HFRepoMetaData":
        raise CasRefusal("this is not a shard: its tag is wrong")
    while (head := _entry(data, at))[:32] != BOOKEND:
        flags = int.from_bytes(head[32:36], "little")
        count = int.from_bytes(head[36:40], "little")
        at += SHARD_ENTRY
        terms = tuple(_term(_entry(data, at + i * SHARD_ENTRY)) for i in range(count))
        at += count * SHARD_ENTRY
        proofs: tuple[bytes, ...] = ()
        if flags & HAS_VERIFICATION:
            proofs = tuple(_entry(data, at + i * SHARD_ENTRY)[:32] for i in range(count))
            at += count * SHARD_ENTRY
        if flags & HAS_METADATA:
            at += SHARD_ENTRY
        files.append(FileEntry(hash_name(head[:32]), terms, proofs))
    return files


def _entry(data: bytes, at: int) -> bytes:
    entry = data[at : at + SHARD_ENTRY]
    if len(entry) < SHARD_ENTRY:
        raise CasRefusal(f"shard is truncated at byte {at} of {len(data)}")
    return entry


def _term(entry: bytes) -> Term:
    size, first, last = (int.from_bytes(entry[i : i + 4], "little") for i in (36, 40, 44))
    return Term(hash_name(entry[:32]), first, last, size)


def verify_file(entry: FileEntry, chunks_of: Callable[[str], Sequence[Chunk] | None]) -> None:
    """Check a declared file against the xorbs that are there.

    `chunks_of` gives a xorb's chunks, or None for one that was never uploaded. Raises `CasRefusal` for an unknown xorb,
    a range outside it, a wrong length, a wrong proof, or chunks that do not hash to the file's name.
    """
    all_chunks: list[Chunk] = []
    for i, term in enumerate(entry.terms):
        known = chunks_of(term.xorb)
        if known is None:
            raise CasRefusal(f"file {entry.hash[:16]}… needs xorb {term.xorb[:16]}…, which was never uploaded")
        if not 0 <= term.first < term.last <= len(known):
            raise CasRefusal(f"file {entry.hash[:16]}… needs chunks {term.first}-{term.last} of {len(known)} in a xorb")
        chunks = known[term.first : term.last]
        if sum(chunk.size for chunk in chunks) != term.size:
            raise CasRefusal(f"file {entry.hash[:16]}… gives a wrong length for term {i}")
        proof = blake3(b"".join(chunk.digest for chunk in chunks), key=RANGE_KEY).digest()
        if entry.range_digests and entry.range_digests[i] != proof:
            raise CasRefusal(f"file {entry.hash[:16]}… gives a wrong proof for term {i}")
        all_chunks += chunks
    if file_hash(all_chunks) != entry.hash:
        raise CasRefusal(f"the chunks declared for file {entry.hash[:16]}… hash to another name")


def cut_terms(terms: Sequence[Term], start: int, end: int) -> tuple[int, list[Term]]:
    """The terms that hold bytes `[start, end)` of a file, and how many bytes of the first one come before `start`."""
    kept: list[Term] = []
    skipped, position = 0, 0
    for term in terms:
        if position < end and position + term.size > start:
            if not kept:
                skipped = start - position
            kept.append(term)
        position += term.size
    return skipped, kept
