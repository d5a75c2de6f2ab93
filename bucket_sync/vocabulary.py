"""The words that every other module uses: run, incarnation, version, and a version's states on a replica.

Everything here is a plain value or a pure rule; nothing does I/O. Parsing is strict: what cannot be named for sure
raises `ValueError`, since a guessed version would be served under a wrong label.
"""

import re
import secrets
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

RUN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\Z")
INCARNATION = re.compile(r"\d{8}t\d{6}z-[0-9a-f]{6}\Z")
SERVED_NAME = re.compile(r"(?P<run>.+)-(?P<incarnation>\d{8}t\d{6}z-[0-9a-f]{6})-v(?P<number>\d+)\Z")
VERSION_KEY = re.compile(r"(?P<run>[^/]+)/(?P<incarnation>[^/]+)/v(?P<number>\d{6,})\.safetensors\Z")

CURRENT_FILE = "current.json"


def check_run_name(run: str) -> str:
    """Return `run` if it is a valid run name, else raise `ValueError` saying what is allowed."""
    if not RUN_NAME.match(run) or ".." in run:
        raise ValueError(
            f"run name {run!r} is not valid: use 1 to 63 lower-case letters, digits, '.', '_' and '-', "
            "starting and ending with a letter or digit, without '..'"
        )
    return run


def mint_incarnation(now: datetime | None = None) -> str:
    """A new incarnation, `<UTC>-<random>`: sorts by time of start and is never minted twice."""
    now = now or datetime.now(UTC)
    return f"{now.astimezone(UTC):%Y%m%dt%H%M%Sz}-{secrets.token_hex(3)}"


def later_incarnation(old: str, now: datetime | None = None) -> str:
    """A new incarnation that sorts after `old`, also within its second, and where its machine's clock was ahead."""
    minted = datetime.strptime(check_incarnation(old).partition("-")[0], "%Y%m%dt%H%M%Sz").replace(tzinfo=UTC)
    return mint_incarnation(max(now or datetime.now(UTC), minted + timedelta(seconds=1)))


def check_incarnation(incarnation: str) -> str:
    if not INCARNATION.match(incarnation):
        raise ValueError(f"incarnation {incarnation!r} is not of the form 20261130t154500z-a1b2c3")
    return incarnation


def version_key(run: str, incarnation: str, number: int) -> str:
    """The one object that holds a version: `<run>/<incarnation>/v000014.safetensors`."""
    if number < 1:
        raise ValueError(f"version number {number} is not positive")
    return f"{check_run_name(run)}/{check_incarnation(incarnation)}/v{number:06d}.safetensors"


class VersionState(StrEnum):
    """Where a version stands on one replica. FAILED is reached from the first four only."""

    WANTED = "WANTED"
    STAGING = "STAGING"
    STAGED = "STAGED"
    LOADED = "LOADED"
    READY = "READY"
    RETIRING = "RETIRING"
    UNLOADED = "UNLOADED"
    FAILED = "FAILED"


# The only moves a version may make on a replica. A restart of the engine sends everything that was
# LOADED, READY or RETIRING back to STAGED (the files are still on local disk).
NEXT_STATES: dict[VersionState, frozenset[VersionState]] = {
    VersionState.WANTED: frozenset({VersionState.STAGING, VersionState.UNLOADED, VersionState.FAILED}),
    VersionState.STAGING: frozenset(
        {VersionState.STAGED, VersionState.WANTED, VersionState.UNLOADED, VersionState.FAILED}
    ),
    VersionState.STAGED: frozenset({VersionState.LOADED, VersionState.UNLOADED, VersionState.FAILED}),
    VersionState.LOADED: frozenset(
        {VersionState.READY, VersionState.STAGED, VersionState.RETIRING, VersionState.FAILED}
    ),
    VersionState.READY: frozenset({VersionState.RETIRING, VersionState.STAGED}),
    VersionState.RETIRING: frozenset({VersionState.UNLOADED, VersionState.STAGED}),
    VersionState.UNLOADED: frozenset(),
    VersionState.FAILED: frozenset({VersionState.UNLOADED}),
}


class VersionRef(BaseModel):
    """One published adapter: what the publisher tells the proxy, and the proxy tells the agents.

    `sha256` and `size` are those of the whole file, so a reader knows at once whether it holds all of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    incarnation: str
    number: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(gt=0)
    step: int = Field(ge=0)

    def model_post_init(self, _context: object) -> None:
        version_key(self.run, self.incarnation, self.number)

    @property
    def key(self) -> str:
        return version_key(self.run, self.incarnation, self.number)

    @property
    def name(self) -> str:
        """The name that vLLM serves it under; unique across runs and restarts, so warm replicas never collide."""
        return served_name(self.run, self.incarnation, self.number)


def served_name(run: str, incarnation: str, number: int) -> str:
    return f"{run}-{incarnation}-v{number}"


def parse_served_name(name: str) -> tuple[str, str, int]:
    """`(run, incarnation, number)` of a name that vLLM serves a version under; `ValueError` for anything else."""
    match = SERVED_NAME.match(name)
    if not match or served_name(match["run"], match["incarnation"], int(match["number"])) != name:
        raise ValueError(f"{name!r} is not the served name of a version")
    return check_run_name(match["run"]), match["incarnation"], int(match["number"])


def parse_version_key(key: str) -> tuple[str, str, int]:
    """`(run, incarnation, number)` of a version's object key; `ValueError` for anything else."""
    match = VERSION_KEY.match(key)
    if not match:
        raise ValueError(f"{key!r} is not the key of a version")
    run, incarnation, number = match["run"], match["incarnation"], int(match["number"])
    if version_key(run, incarnation, number) != key:
        raise ValueError(f"{key!r} is not the key of a version")
    return run, incarnation, number
