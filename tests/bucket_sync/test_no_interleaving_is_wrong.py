"""No interleaving of publishes, crashes, restarts, retention, bad mounts and three readers exposes a wrong version.

A reader that exposes a version holds exactly what its publisher committed; a confirmed version that is still wanted, in
the window or the newest is never lost; no name ever stands for two contents.
"""

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from peft_folders import BASE, write_adapter
from simulated_bucket import STARTED, Bucket, ReaderView, WriterMount

from bucket_grpo.bucket_sync.current import Superseded, claim
from bucket_grpo.bucket_sync.handover import hand_over
from bucket_grpo.bucket_sync.publisher import check_fence
from bucket_grpo.bucket_sync.retention import Janitor, RetentionRules
from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import Conflict, StoreError
from bucket_grpo.bucket_sync.version_file import VersionRejected, pack_version, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef, parse_version_key

RUN = "run"
WINDOW = 2
MEMORY = Path("/dev/shm")  # thousands of fsyncs and deleted folders take long on a disk
LOST = st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=3)
WEATHER = st.lists(st.sampled_from(["truth", "missing", "eio", "former", "part", "garbage", "neighbour"]), max_size=2)


class Trainer:
    """One incarnation on one machine; `number` is the version that it works on."""

    def __init__(self, folder: Path, bucket: Bucket, born: int) -> None:
        self.incarnation = f"{STARTED + timedelta(seconds=born):%Y%m%dt%H%M%Sz}-{born:06x}"
        self.mount = WriterMount(folder / f"writer-{born}", bucket)
        self.number = 0
        self.alive = True


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=MEMORY if MEMORY.is_dir() else None))
        self.bucket = Bucket()
        self.trainers: list[Trainer] = []
        self.packed: dict[str, bytes] = {}  # key → the only bytes that it may ever stand for
        self.confirmed: dict[str, VersionRef] = {}
        self.wanted: dict[str, VersionRef] = {}
        self.deleted: set[str] = set()
        self.views = [ReaderView(self.bucket) for _ in range(3)]
        self.stagers = [
            Stager(view, view if index else None, self.folder / f"reader-{index}", BASE, avoid_s=0.0)
            for index, view in enumerate(self.views)
        ]
        self.exposed: dict[int, dict[str, VersionRef]] = {0: {}, 1: {}, 2: {}}
        self.start_a_trainer()

    def teardown(self) -> None:
        self.everything_heals()
        shutil.rmtree(self.folder)

    @property
    def newest(self) -> Trainer:
        return self.trainers[-1]

    # ---- trainers

    @precondition(lambda self: not self.newest.alive or len(self.trainers) < 3)
    @rule()
    def start_a_trainer(self) -> None:
        """A restart after a crash, or beside a trainer that does not know yet."""
        trainer = Trainer(self.folder, self.bucket, len(self.trainers))
        self.trainers.append(trainer)
        claim(self.bucket, RUN, trainer.incarnation)

    @precondition(lambda self: self.newest.alive)
    @rule(count=st.integers(1, 4), seed=st.integers(0, 2**20), lost=LOST, attempts=st.integers(1, 3))
    def publish(self, count: int, seed: int, lost: list[bool], attempts: int) -> None:
        for each in range(count):
            if self.newest.alive:
                self._publish(self.newest, seed + each, lost, attempts)

    @precondition(lambda self: any(trainer.alive for trainer in self.trainers[:-1]))
    @rule(seed=st.integers(0, 2**20), lost=LOST)
    def a_superseded_trainer_publishes(self, seed: int, lost: list[bool]) -> None:
        trainer = next(trainer for trainer in self.trainers if trainer.alive)
        self._publish(trainer, seed, lost, attempts=1)
        assert not trainer.alive

    def _publish(self, trainer: Trainer, seed: int, lost: list[bool], attempts: int) -> None:
        trainer.number += 1
        ref = self._write(trainer, seed, [not value for value in lost], attempts)
        if ref is not None:
            self.confirmed[ref.key] = self.wanted[ref.key] = ref

    def _write(self, trainer: Trainer, seed: int, outcomes: list[bool], attempts: int) -> VersionRef | None:
        packed, ref = self._pack(trainer, seed)
        self.packed[ref.key] = packed

        def load() -> bytes:
            trainer.mount.flush(outcomes)  # the mount's own loop runs whenever it likes
            return packed

        try:
            check_fence(self.bucket, RUN, trainer.incarnation)
            for _ in range(attempts):
                try:
                    hand_over(trainer.mount, {ref.key: load}, attempts=1, confirm_s=0.0)
                    return ref
                except StoreError:
                    trainer.mount.flush(outcomes)
            hand_over(trainer.mount, {ref.key: load}, attempts=1, confirm_s=0.0)
            return ref
        except Superseded:
            assert trainer is not self.newest
            trainer.alive = False
        except StoreError:
            trainer.alive = False  # what cannot be published stops the run
        return None

    def _pack(self, trainer: Trainer, seed: int) -> tuple[bytes, VersionRef]:
        adapter = write_adapter(self.folder / "adapter", seed=seed, width=2)
        who = {"run": RUN, "incarnation": trainer.incarnation, "number": trainer.number, "step": seed}
        return pack_version(adapter, base_model=BASE, **who)

    @precondition(lambda self: self.newest.alive and self.newest.number > 0)
    @rule(seed=st.integers(2**21, 2**22))
    def publish_another_version_under_the_same_name(self, seed: int) -> None:
        packed, ref = self._pack(self.newest, seed)
        with pytest.raises(Conflict):
            hand_over(self.newest.mount, {ref.key: lambda: packed}, attempts=2, confirm_s=0.0)

    @precondition(lambda self: self.newest.alive)
    @rule(seed=st.integers(0, 2**20), part=st.none() | st.floats(0, 1), reaches_the_bucket=st.booleans())
    def crash(self, seed: int, part: float | None, reaches_the_bucket: bool) -> None:
        """Between publishes, or while a version is being written: then the mount may still commit the part."""
        trainer = self.newest
        trainer.alive = False
        if part is None:
            return
        trainer.number += 1
        packed, ref = self._pack(trainer, seed)
        self.packed[ref.key] = packed
        path = trainer.mount.path / ref.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed[: int(part * len(packed))])
        trainer.mount.flush([reaches_the_bucket])

    @rule(data=st.data(), outcomes=st.lists(st.booleans(), min_size=1, max_size=3))
    def a_mount_flushes(self, data: st.DataObject, outcomes: list[bool]) -> None:
        data.draw(st.sampled_from(self.trainers)).mount.flush(outcomes)

    # ---- retention and the fleet's wishes

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        newest = max(self.wanted)
        key = data.draw(st.sampled_from(sorted(self.wanted)))
        if key != newest:
            del self.wanted[key]

    @rule(data=st.data())
    def retention(self, data: st.DataObject) -> None:
        trainer = data.draw(st.sampled_from(self.trainers))
        rules = RetentionRules(window=WINDOW, dead_after=timedelta(seconds=data.draw(st.sampled_from([0, 10**9]))))
        try:
            gone = Janitor(trainer.mount, RUN, trainer.incarnation, lambda: set(self.wanted), rules).sweep()
        except (Superseded, StoreError):
            return
        assert not set(gone) & set(self.wanted)
        mine = f"{RUN}/{trainer.incarnation}/"
        window = sorted(key for key in [*self.bucket.objects, *gone] if key.startswith(mine))[-WINDOW:]
        assert not set(gone) & set(window)
        self.deleted |= set(gone)

    # ---- readers

    @precondition(lambda self: self.confirmed)
    @rule(data=st.data(), reader=st.integers(0, 2), weather=WEATHER)
    def stage(self, data: st.DataObject, reader: int, weather: list[str]) -> None:
        ref = self.confirmed[data.draw(st.sampled_from(sorted(self.confirmed)))]
        self.views[reader].weather = weather
        try:
            self.stagers[reader].stage(ref, deadline_s=0.0)
        except (StoreError, VersionRejected):
            return
        self.exposed[reader][ref.key] = ref

    @rule(reader=st.integers(0, 2), keep=st.integers(0, 3))
    def an_agent_restarts(self, reader: int, keep: int) -> None:
        kept = dict(list(self.exposed[reader].items())[:keep])
        self.stagers[reader].keep_only(list(kept.values()))
        self.exposed[reader] = kept

    # ---- what always holds

    @invariant()
    def what_is_exposed_is_what_was_committed(self) -> None:
        for reader, refs in self.exposed.items():
            on_disk = {path.name for path in (self.folder / f"reader-{reader}").glob("*")}
            assert on_disk == {ref.name for ref in refs.values()}
            for ref in refs.values():
                folder = self.stagers[reader].folder(ref)
                staged = (folder / "adapter_model.safetensors").read_bytes()
                assert staged.endswith(bytes(verify_version(self.packed[ref.key], expect=ref).body))

    @invariant()
    def no_confirmed_version_is_lost(self) -> None:
        for key in self.confirmed.keys() - self.deleted:
            assert self.bucket.objects[key] == self.packed[key]
        assert self.wanted.keys() <= self.bucket.objects.keys()
        if self.confirmed:
            assert max(self.confirmed) in self.bucket.objects

    @invariant()
    def a_name_stands_for_one_content(self) -> None:
        for key, contents in self.bucket.ever.items():
            try:
                parse_version_key(key)
            except ValueError:
                continue
            for content in contents:  # whole, or the part that a crash left, which nobody was told of
                assert self.packed[key].startswith(content)
                assert content == self.packed[key] or key not in self.confirmed

    def everything_heals(self) -> None:
        """Once nothing fails any more, every reader gets every wanted version."""
        for reader, view in enumerate(self.views):
            view.weather = []
            for ref in self.wanted.values():
                self.stagers[reader].stage(ref, deadline_s=5.0)
                self.exposed[reader][ref.key] = ref
        self.what_is_exposed_is_what_was_committed()


SETTINGS = {
    "deadline": None,
    "stateful_step_count": 40,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@pytest.mark.timeout(300)
class TestFleet(Fleet.TestCase):
    settings = settings(max_examples=200, **SETTINGS)


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestFleetForLong(Fleet.TestCase):
    settings = settings(max_examples=2000, **SETTINGS)
