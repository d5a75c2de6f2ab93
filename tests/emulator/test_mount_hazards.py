"""Three ways in which a mount breaks a two-file publish by rename, and why one file per version survives them.

The naive publish is what one would do on a local disk: write `config` and `weights` into a temporary folder, rename it
to its final name, and let readers look for that name. Ours writes one file under its final name, once, and tells
readers of it after the commit. Both run through the same mounts (times are a tenth of the real ones).
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mount_processes import Mounts, needs_fuse, wait_for

pytestmark = needs_fuse

WEIGHTS = b"w" * 2_000_000
OLD_CACHE = ("--profile", "hf-mount-2026-08", "--set", "poll_s=1000")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.close()


def naive_publish(mount: Path, version: str, *, pause_s: float = 0.0, rename_to: str | None = None) -> None:
    """Two files into a folder, a pause, and the rename."""
    folder = mount / f"{version}.tmp"
    folder.mkdir()
    (folder / "config").write_bytes(b"{}")
    (folder / "weights").write_bytes(WEIGHTS)
    time.sleep(pause_s)
    folder.rename(mount / (rename_to or version))


def publish_one_file(mount: Path, version: str) -> None:
    (mount / f"{version}.safetensors").write_bytes(b"{}" + WEIGHTS)


def seen(mount: Path, version: str) -> set[str]:
    """The files of a two-file version that a reader finds by name."""
    return {name for name in ("config", "weights") if (mount / version / name).exists()}


def test_an_early_probe_hides_the_naive_version_but_not_one_that_nobody_probes(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer")
    naive = mounts.mount("naive", "--read-only", *OLD_CACHE)
    told = mounts.mount("told", "--read-only", *OLD_CACHE)
    probed = time.monotonic()
    assert seen(naive.path, "v1") == set(), "the naive reader polls for the name: too early"
    naive_publish(trainer.path, "v1")
    publish_one_file(trainer.path, "v2")
    wait_for(lambda: (mounts.objects / "v2.safetensors").exists() and (mounts.objects / "v1" / "weights").exists())
    assert (told.path / "v2.safetensors").read_bytes() == b"{}" + WEIGHTS, "told after the commit: there at once"
    assert seen(naive.path, "v1") == set(), "committed, but hidden by the probe"
    wait_for(lambda: seen(naive.path, "v1") == {"config", "weights"})
    assert time.monotonic() - probed >= 3.0


def test_a_rename_during_the_upload_loses_the_naive_version_for_every_reader(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", "--set", "upload_s=10")  # one second
    reader = mounts.mount("reader", "--read-only")
    naive_publish(trainer.path, "v1", pause_s=0.6)  # past the debounce: the upload has begun
    publish_one_file(trainer.path, "v2")
    wait_for((mounts.objects / "v2.safetensors").exists)
    assert (reader.path / "v2.safetensors").read_bytes() == b"{}" + WEIGHTS
    assert seen(reader.path, "v1") == set(), "the name that readers were given does not exist"
    assert seen(mounts.objects, "v1.tmp") == {"config", "weights"}, "the bytes are under the old one, for good"
    assert trainer.stop() == 0
    assert not (mounts.objects / "v1").exists(), "not even a clean end repairs it"


def test_files_closed_further_apart_than_the_debounce_show_half_a_version(mounts: Mounts) -> None:
    trainer, reader = mounts.mount("trainer"), mounts.mount("reader", "--read-only", "--set", "negative_ttl_s=0")
    (trainer.path / "v1").mkdir()
    (trainer.path / "v1" / "config").write_bytes(b"{}")
    wait_for(lambda: seen(reader.path, "v1") == {"config"})  # whatever is written first, readers see it alone
    (trainer.path / "v1" / "weights").write_bytes(WEIGHTS)
    wait_for(lambda: seen(reader.path, "v1") == {"config", "weights"})


@pytest.mark.parametrize("order", ["false", "true"])
def test_files_of_one_batch_still_show_half_a_version_in_either_order(mounts: Mounts, order: str) -> None:
    faults = ("--fault", "op_gap_s=0.5", "--fault", f"reverse_batches={order}")
    trainer, reader = (
        mounts.mount("trainer", *faults),
        mounts.mount("reader", "--read-only", "--set", "negative_ttl_s=0"),
    )
    naive_publish(trainer.path, "v1")
    halves = []
    wait_for(lambda: halves.append(seen(reader.path, "v1")) or len(halves[-1]) == 2)
    assert ({"weights"} if order == "true" else {"config"}) in halves


def test_a_rename_of_a_committed_folder_shows_halves_of_it_under_both_names(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", "--fault", "op_gap_s=0.5")
    naive_publish(trainer.path, "v1", rename_to="v1.tmp2")
    wait_for((mounts.objects / "v1.tmp2" / "weights").exists)
    time.sleep(0.3)  # the flush is answered: the files are clean
    move = subprocess.Popen(["mv", "-T", trainer.path / "v1.tmp2", trainer.path / "v1"])
    states = []
    wait_for(lambda: states.append((seen(mounts.objects, "v1"), seen(mounts.objects, "v1.tmp2"))) or not states[-1][1])
    assert move.wait(10) == 0
    assert ({"config"}, {"config", "weights"}) in states, "half of the new name"
    assert ({"config", "weights"}, {"weights"}) in states, "half of the old name"


def test_no_moment_shows_half_of_a_version_that_is_one_file(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", "--fault", "op_gap_s=0.1", "--fault", "reverse_batches=true")
    reader = mounts.mount("reader", "--read-only", "--set", "negative_ttl_s=0")
    for version in ("v1", "v2", "v3"):
        publish_one_file(trainer.path, version)
    sizes = set()
    for version in ("v1", "v2", "v3"):
        file = reader.path / f"{version}.safetensors"
        wait_for(lambda file=file: sizes.add(len(file.read_bytes()) if file.exists() else 0) or file.exists())
        assert file.read_bytes() == b"{}" + WEIGHTS
    assert sizes <= {0, len(WEIGHTS) + 2}
