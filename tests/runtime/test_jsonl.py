"""A follower sees each line once, whole, also when the file is replaced."""

from pathlib import Path

from bucket_grpo.runtime.jsonl import Follower


def test_a_line_is_seen_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    with open(path, "w") as file:
        file.write('{"a": 1}\n{"a"')
        file.flush()
        assert follower.new() == [{"a": 1}]
        assert follower.new() == []
        file.write(": 2}\n")
        file.flush()
        assert follower.new() == [{"a": 2}]


def test_a_file_that_takes_its_place_is_read_from_the_start(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    follower = Follower(path)
    assert len(follower.new()) == 3
    other.write_text('{"a": 1}\n')
    other.rename(path)
    assert follower.new() == [{"a": 1}]
