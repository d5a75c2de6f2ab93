"""The xet formats: what is stored is what its name says, and nothing else gets in."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.emulator.cas import (
    EMPTY_FILE,
    CasRefusal,
    FileEntry,
    Term,
    chunk_digest,
    cut_terms,
    file_hash,
    hash_name,
    read_shard,
    read_xorb,
    tree_digest,
    unpack_chunk,
    verify_file,
)
from tests.emulator.xet_bytes import chunks_of, digest_of, pack_chunk, pack_file, pack_shard, pack_xorb, proof_of

CONTENTS = [os.urandom(1000), b"zeros" * 500, os.urandom(3)]


def test_a_name_is_four_little_endian_words() -> None:
    assert hash_name(bytes(range(32))) == "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
    assert digest_of(hash_name(bytes(range(32)))) == bytes(range(32))


def test_a_tree_of_one_chunk_is_the_chunk_and_of_none_is_zero() -> None:
    digest = chunk_digest(b"hello")
    assert tree_digest([(digest, 5)]) == digest
    assert tree_digest([]) == bytes(32)
    assert file_hash([]) == EMPTY_FILE


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60))
def test_a_tree_depends_on_every_chunk_and_on_their_order(words: list[int]) -> None:
    nodes = [(struct.pack("<4Q", i, word, word, word), 10 + i) for i, word in enumerate(words)]
    root = tree_digest(nodes)
    assert tree_digest([*nodes[1:], nodes[0]]) != root
    assert tree_digest(nodes[:-1]) != root


@given(st.binary(max_size=300), st.sampled_from([0, 1, 2]))
def test_a_chunk_unpacks_to_what_was_packed(content: bytes, scheme: int) -> None:
    assert unpack_chunk(memoryview(pack_chunk(content, scheme))) == content


@pytest.mark.parametrize("scheme", [0, 1, 2])
def test_a_xorb_is_read_under_its_own_name_only(scheme: int) -> None:
    name, data = pack_xorb(CONTENTS, scheme)
    assert read_xorb(data, name) == chunks_of(CONTENTS, scheme)
    assert read_xorb(data + b"XETBLOB and a footer", name) == chunks_of(CONTENTS, scheme)
    with pytest.raises(CasRefusal, match="hash to"):
        read_xorb(data, "0" * 64)


def test_a_xorb_with_one_flipped_bit_is_refused() -> None:
    name, data = pack_xorb(CONTENTS, 0)
    for at in (8, 500, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 1
        with pytest.raises(CasRefusal):
            read_xorb(bytes(broken), name)


@given(st.integers(0, 3500))
def test_a_truncated_xorb_is_refused(keep: int) -> None:
    name, data = pack_xorb(CONTENTS, 0)
    with pytest.raises(CasRefusal):
        read_xorb(data[: min(keep, len(data) - 1)], name)


def test_a_xorb_that_does_not_unpack_is_refused() -> None:
    packed = bytearray(pack_chunk(b"zeros" * 500, 1))
    packed[8:12] = b"junk"
    with pytest.raises(CasRefusal, match="does not unpack"):
        read_xorb(bytes(packed), "0" * 64)


@pytest.mark.parametrize(("at", "value"), [(0, 1), (4, 3), (7, 0xFF)])
def test_an_unknown_chunk_header_is_refused(at: int, value: int) -> None:
    packed = bytearray(pack_chunk(b"hello"))
    packed[at] = value
    with pytest.raises(CasRefusal, match="header"):
        unpack_chunk(memoryview(packed))


def test_a_shard_says_which_chunks_make_a_file() -> None:
    name, (xorb, _), shard = pack_file(CONTENTS)
    (entry,) = read_shard(shard)
    assert entry == FileEntry(name, (Term(xorb, 0, 3, 3503),), (proof_of(chunks_of(CONTENTS)),))
    assert entry.size == 3503
    verify_file(entry, {xorb: chunks_of(CONTENTS)}.get)


def test_a_shard_that_names_an_unknown_xorb_is_refused() -> None:
    _, _, shard = pack_file(CONTENTS)
    with pytest.raises(CasRefusal, match="never uploaded"):
        verify_file(read_shard(shard)[0], {}.get)


def test_a_shard_that_lies_about_a_file_is_refused() -> None:
    chunks = chunks_of(CONTENTS)
    xorb = pack_xorb(CONTENTS)[0]
    name, whole, proof = file_hash(chunks), Term(xorb, 0, 3, 3503), proof_of(chunks)
    lies = {
        "outside": FileEntry(name, (Term(xorb, 0, 4, 3503),), ()),
        "empty range": FileEntry(name, (Term(xorb, 1, 1, 0),), ()),
        "length": FileEntry(name, (Term(xorb, 0, 3, 3502),), ()),
        "proof": FileEntry(name, (whole,), (bytes(32),)),
        "name": FileEntry("1" * 64, (whole,), (proof,)),
        "half the file": FileEntry(name, (Term(xorb, 0, 2, 3500),), ()),
    }
    for entry in lies.values():
        with pytest.raises(CasRefusal):
            verify_file(entry, {xorb: chunks}.get)
    verify_file(FileEntry(name, (whole,), (proof,)), {xorb: chunks}.get)


def test_a_truncated_or_foreign_shard_is_refused() -> None:
    shard = pack_shard([(pack_file(CONTENTS)[0], [Term("2" * 64, 0, 1, 5)], [bytes(32)])])
    end_of_files = shard.index(b"\xff" * 32)
    for keep in range(0, end_of_files, 7):
        with pytest.raises(CasRefusal):
            read_shard(shard[:keep])
    with pytest.raises(CasRefusal, match="tag"):
        read_shard(b"PK" + shard[2:])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_a_range_keeps_just_the_terms_that_hold_it(sizes: list[int], data: st.DataObject) -> None:
    terms = [Term(str(i), 0, 1, size) for i, size in enumerate(sizes)]
    text = b"".join(bytes([i]) * size for i, size in enumerate(sizes))
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    skipped, kept = cut_terms(terms, start, end)
    unpacked = b"".join(bytes([int(term.xorb)]) * term.size for term in kept)
    assert unpacked[skipped : skipped + end - start] == text[start:end]
    assert skipped < kept[0].size
