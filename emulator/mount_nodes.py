"""The vocabulary of a mount: files and folders as it sees them, and what it may ask the bucket."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from bucket_grpo.emulator.backends import Listing, Operation, Stat


@dataclass(frozen=True)
class Head:
    """Answered with `Stat | None`."""

    key: str


@dataclass(frozen=True)
class ListFolder:
    """Answered with a `Listing`."""

    key: str


@dataclass(frozen=True)
class Commit:
    """Answered with None once sent; operations that the bucket did not apply go unnoticed, as in hf-mount."""

    operations: tuple[Operation, ...]


Question = Head | ListFolder | Commit
Answer = Stat | Listing | None
R = TypeVar("R")
Inquiry = Generator[Question, Answer, R]


@dataclass(eq=False)
class Node:
    """A file or folder as this mount sees it; `key` follows renames, `etag` is None until the first commit."""

    key: str
    is_folder: bool = False
    size: int = 0
    mtime: float = 0.0
    etag: str | None = None
    generation: int = 0  # counts local changes since the last commit; 0 is clean
    staged_is_current: bool = False  # the local staging file holds exactly `etag`
    validated_at: float | None = None
    placed_at: float = 0.0  # when this mount put it at its key or committed it there: older answers say nothing of it
    listed: bool = False
    made_here: bool = False  # a folder that the bucket has not shown yet
    handles: int = 0
    unlinked: bool = False
    old_keys: list[str] = field(default_factory=list)  # where the bucket still shows it; deleted by the next flush
    children: dict[str, "Node"] = field(default_factory=dict)

    @property
    def dirty(self) -> bool:
        return self.generation > 0

    def changed(self, size: int, wall: float) -> None:
        self.generation += 1
        self.size, self.mtime, self.staged_is_current = size, wall, False


@dataclass(frozen=True)
class FlushItem:
    """One file of a batch, as it was when its upload began: a rename from then on comes too late."""

    node: Node
    key: str
    generation: int
    old_keys: tuple[str, ...]


def parent_of(key: str) -> str:
    return key.rpartition("/")[0]


def name_of(key: str) -> str:
    return key.rpartition("/")[2]


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in list(node.children.values()):
        yield from walk(child)


def in_use(node: Node) -> bool:
    return any(n.dirty or n.handles for n in walk(node))
