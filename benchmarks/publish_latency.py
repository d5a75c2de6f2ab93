"""How long a version takes from the trainer's disk to two replicas' disks, verified: by mounts and by the Hub's API.

Everything is real but the Hub: the released client, one FUSE mount per machine with hf-mount's delays (not shortened),
paths-info as confirmation. Replicas are told right after the confirmation, as the proxy does.

    python benchmarks/publish_latency.py --json
    python benchmarks/publish_latency.py --publishes 5 --naive-publishes 2 --sizes 5 --json

Fields: `mount_p50_s` (hf-mount since September 2026), `mount_old_cache_p50_s` (before: a missing name stays missing for
30 s, which never hits a replica that does not probe), `naive_old_cache_p50_s` (there, with a replica that polls for the
file), `hub_p50_s` (no mount), `mount_with_checkpoint_p50_s` and `hub_with_checkpoint_p50_s` (while checkpoints are
being uploaded through the Hub's API), and the same with `_160mb` behind.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from bucket_grpo.bucket_sync.handover import hand_over
from bucket_grpo.bucket_sync.hub_store import HubStore
from bucket_grpo.bucket_sync.mounted_store import MountedStore
from bucket_grpo.bucket_sync.safetensors_file import TensorInfo, header_for
from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.store_contract import Store
from bucket_grpo.bucket_sync.version_file import pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef, mint_incarnation

BASE = "benchmark/base"
MODULES, WIDTH = 196, 3200  # 28 layers of 7 projections: rank 1 in float32 is 5 MB, rank 32 is 160 MB
READERS = 2
KINDS = ("mount", "mount_with_checkpoint", "mount_old_cache", "naive_old_cache", "hub", "hub_with_checkpoint")
START_S = 60


class Machines:
    """The emulated Hub and the mounts, each a process; all end with the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._count = 0
        self.endpoint = self._start("serve", "--root", str(folder / "hub"), says="serving ")
        tokens = json.loads((folder / "hub" / "tokens.json").read_text())
        self.token: str = tokens["users"][0]["tokens"]["write"]
        self._admin: str = tokens["admin"]
        self._buckets: list[HubStore] = []

    def collect_garbage(self) -> None:
        """Free the disk from what earlier sizes left."""
        for bucket in self._buckets:
            bucket.delete([info.key for info in bucket.list("")])
        url = f"{self.endpoint}/_emulator/garbage?older_than_s=0"
        httpx.delete(url, headers={"Authorization": f"Bearer {self._admin}"}, timeout=60).raise_for_status()

    def bucket(self) -> HubStore:
        self._count += 1
        store = HubStore(f"me/bench-{self._count}", endpoint=self.endpoint, token=self.token)
        store.api.create_bucket(store.bucket_id)
        self._buckets.append(store)
        return store

    def mount(self, bucket: HubStore, profile: str, *, read_only: bool) -> MountedStore:
        self._count += 1
        path = self._folder / f"mount-{self._count}"
        flags = ["--endpoint", self.endpoint, "--profile", profile, *(["--read-only"] if read_only else [])]
        self._start("mount", bucket.bucket_id, str(path), *flags, says="mounted ")
        return MountedStore(path, committed_in=bucket)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()

    def _start(self, *arguments: str, says: str) -> str:
        log = (self._folder / "emulator.log").open("a")
        environment = {**os.environ, "HF_TOKEN": getattr(self, "token", "")}
        process = subprocess.Popen(
            [sys.executable, "-m", "bucket_grpo.emulator", *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(says):
                return line.removeprefix(says).strip()
        raise SystemExit(
            f"`emulator {arguments[0]}` did not start: {(self._folder / 'emulator.log').read_text()[-2000:]}"
        )


class Trainer:
    """Saves adapters of one rank; each is different, as after some steps of training."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder / f"adapter-r{rank}", rank
        self._incarnation = mint_incarnation()
        self._number = 0
        self._folder.mkdir()
        self._index: dict[str, TensorInfo] = {}
        position = 0
        for module in range(MODULES):
            for side, shape in (("A", (rank, WIDTH)), ("B", (WIDTH, rank))):
                size = rank * WIDTH * 4
                name = f"base_model.model.model.layers.{module}.proj.lora_{side}.weight"
                self._index[name] = TensorInfo("F32", shape, position, position + size)
                position += size
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2,
            "target_modules": ["proj"],
            "base_model_name_or_path": BASE,
        }
        (self._folder / "adapter_config.json").write_text(json.dumps(config))
        self._body = np.random.default_rng(0).standard_normal(position // 4, dtype=np.float32)

    def save(self) -> Path:
        self._body += np.float32(1e-3)  # every byte changes, so that no upload is saved by deduplication
        with (self._folder / "adapter_model.safetensors").open("wb") as file:
            file.write(header_for({"format": "pt"}, self._index))
            file.write(self._body.tobytes())
        return self._folder

    def pack(self, adapter: Path) -> tuple[bytes, VersionRef]:
        self._number += 1
        who = {"run": "bench", "incarnation": self._incarnation, "number": self._number, "step": self._number}
        return pack_version(adapter, base_model=BASE, **who)


def told_readers(stores: list[Store], folder: Path) -> Callable[[VersionRef], None]:
    """Replicas that look when they are told: the returned call stages a version on all of them at once."""
    stagers = [Stager(store, None, folder / f"staging-{i}", BASE, read_s=60) for i, store in enumerate(stores)]
    pool = ThreadPoolExecutor(len(stagers))

    def stage(ref: VersionRef) -> None:
        for done in [pool.submit(stager.stage, ref, 120.0) for stager in stagers]:
            done.result()
        for stager in stagers:
            stager.evict(ref)

    return stage


def measure(
    writer: Store, trainer: Trainer, publishes: int, stage: Callable[[VersionRef], None], early: bool = False
) -> list[float]:
    """Seconds from the saved adapter to all replicas, per publish. `early`: replicas start looking at once."""
    taken = []
    for _ in range(publishes):
        adapter = trainer.save()
        started = time.perf_counter()
        data, ref = trainer.pack(adapter)
        if early:
            with ThreadPoolExecutor(1) as pool:
                staged = pool.submit(stage, ref)
                hand_over(writer, {ref.key: lambda data=data: data})  # type: ignore[misc]
                staged.result()
        else:
            hand_over(writer, {ref.key: lambda data=data: data})  # type: ignore[misc]
            stage(ref)
        taken.append(time.perf_counter() - started)
    return taken


def polling_readers(stores: list[MountedStore], folder: Path) -> Callable[[VersionRef], None]:
    """What one would write without knowing mounts: poll until the file exists, then load it."""
    load = told_readers(list(stores), folder)

    def stage(ref: VersionRef) -> None:
        for store in stores:
            while not (store.path / ref.key).exists():
                time.sleep(0.2)
        load(ref)

    return stage


@contextlib.contextmanager
def checkpoint_in_flight(store: HubStore, megabytes: int) -> Iterator[None]:
    """Another process of the trainer's job uploads checkpoints all the time, at the lowest priority of the CPU."""
    program = (
        "import os, sys; from bucket_grpo.bucket_sync.hub_store import HubStore; os.nice(19)\n"
        "store = HubStore(sys.argv[1], endpoint=sys.argv[2], token=sys.argv[3])\n"
        "print('started', flush=True)\n"
        "for i in range(10**6): store.write_once(f'checkpoints/{i}', os.urandom(int(sys.argv[4]) * 10**6))\n"
    )
    command = [sys.executable, "-c", program, store.bucket_id, store.api.endpoint, str(store.api.token), str(megabytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


@dataclass
class Bench:
    """Adapters of one size through every way; `figures` is the JSON to be, each of them is also printed as it comes."""

    arguments: argparse.Namespace
    machines: Machines
    folder: Path
    megabytes: int
    figures: dict[str, object]

    def __post_init__(self) -> None:
        self.suffix = "" if self.megabytes == 5 else f"_{self.megabytes}mb"
        self.trainer = Trainer(self.folder, rank=max(1, self.megabytes // 5))

    def wants(self, *names: str) -> bool:
        return bool(set(names) & set(self.arguments.only))

    def note(self, name: str, taken: list[float]) -> None:
        if taken:
            p50, longest = statistics.median(taken), max(taken)
            self.figures[f"{name}_p50_s{self.suffix}"] = round(p50, 3)
            self.figures[f"{name}_max_s{self.suffix}"] = round(longest, 3)
            print(f"{name}{self.suffix}: p50 {p50:.2f} s, max {longest:.2f} s of {len(taken)} publishes", flush=True)

    def run(self) -> None:
        if self.wants("mount", "mount_with_checkpoint"):
            self.through_mounts("hf-mount-2026-09", "mount")
        if self.wants("mount_old_cache", "naive_old_cache"):
            self.through_mounts("hf-mount-2026-08", "mount_old_cache")
        if self.wants("hub", "hub_with_checkpoint"):
            bucket = self.machines.bucket()
            self.told("hub", bucket, bucket, [bucket] * READERS)

    def through_mounts(self, profile: str, name: str) -> None:
        bucket = self.machines.bucket()
        writer = self.machines.mount(bucket, profile, read_only=False)
        views = [self.machines.mount(bucket, profile, read_only=True) for _ in range(READERS)]
        self.told(name, bucket, writer, list(views))
        if name == "mount_old_cache" and self.wants("naive_old_cache"):
            stage = polling_readers(views, self.folder / f"naive{self.suffix}")
            publishes = self.arguments.naive_publishes
            self.note("naive_old_cache", measure(writer, self.trainer, publishes, stage, early=True))

    def told(self, name: str, bucket: HubStore, writer: Store, views: list[Store]) -> None:
        stage = told_readers(views, self.folder / f"{name}{self.suffix}")
        publishes = self.arguments.publishes
        if self.wants(name):
            self.note(name, measure(writer, self.trainer, publishes, stage))
        # Checkpoints fill the disk fast, so one size has to do.
        if self.wants(f"{name}_with_checkpoint") and self.megabytes == min(self.arguments.sizes):
            with checkpoint_in_flight(bucket, self.arguments.checkpoint_mb):
                self.note(f"{name}_with_checkpoint", measure(writer, self.trainer, publishes, stage))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=30, help="of each kind and size")
    parser.add_argument("--naive-publishes", type=int, default=30, help="each takes half a minute")
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 160], metavar="MB", help="multiples of 5")
    parser.add_argument("--checkpoint-mb", type=int, default=200)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=KINDS, default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="publish-latency-") as folder:
        machines = Machines(Path(folder))
        figures: dict[str, object] = {"publishes": arguments.publishes, "readers": READERS}
        try:
            for megabytes in arguments.sizes:
                Bench(arguments, machines, Path(folder), megabytes, figures).run()
                machines.collect_garbage()
        finally:
            machines.stop()
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
