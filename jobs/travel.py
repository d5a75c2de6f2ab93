"""What a run takes along into its jobs, through the bucket: run file, plan, our wheel, the user's code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bucket_grpo.bucket_sync.store_contract import Store
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.wheel import build_wheel, wheel_name

PLAN_FILE = "plan.json"
RUN_FILE = "run.yaml"
MAX_FILE_BYTES = 512 * 2**20
_DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


def local_files(reward_funcs: list[Any], dataset_name: str | None, base: Path) -> dict[str, Path]:
    """The files on this machine that a run file names, as it names them: rewards (`./file.py:function`) and data.

    Raises `ValueError` for one that is named but not there, and for two of the same name.
    """
    named = [str(reward).partition(":")[0] for reward in reward_funcs]
    wanted = [name for name in named if name.endswith(".py")]
    if dataset_name and dataset_name.endswith(_DATA_SUFFIXES):
        wanted.append(dataset_name)
    found: dict[str, Path] = {}
    for name in dict.fromkeys(wanted):
        path = (base / name).resolve()
        if not path.is_file():
            raise ValueError(f"{name}: there is no such file (looked in {base})")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"{name} has {path.stat().st_size >> 20} MiB: upload it as a dataset and name that instead"
            )
        if any(other.name == path.name for other in found.values()):
            raise ValueError(f"two files are called {path.name}: rename one, since both travel into the same folder")
        found[name] = path
    return found


def pack(plan: Plan, run_yaml: str, files: Mapping[str, Path]) -> dict[str, bytes]:
    """Object key → bytes for everything that a launch leaves in the bucket before it starts a job."""
    folder = plan.launch_folder
    packed = {
        f"{folder}{PLAN_FILE}": plan.dump(),
        f"{folder}{RUN_FILE}": run_yaml.encode(),
        f"{folder}wheels/{wheel_name()}": build_wheel(),
    }
    return packed | {f"{folder}files/{path.name}": path.read_bytes() for path in files.values()}


def read_plan(store: Store, run: str, incarnation: str) -> Plan:
    return Plan.load(store.read(f"{run}/{incarnation}/launch/{PLAN_FILE}"))


def unpack(store: Store, plan: Plan, folder: Path) -> Path:
    """Put the run file and the user's files on local disk, the names in it changed to where they are now."""
    folder.mkdir(parents=True, exist_ok=True)
    moved: dict[str, str] = {}
    for name, stored in plan.files.items():
        target = folder / "files" / stored
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(store.read(f"{plan.launch_folder}files/{stored}", max_bytes=MAX_FILE_BYTES))
        moved[name] = str(target)
    run = yaml.safe_load(store.read(f"{plan.launch_folder}{RUN_FILE}"))
    run["reward_funcs"] = [_renamed(str(reward), moved) for reward in run.get("reward_funcs") or []]
    if run.get("dataset_name") in moved:
        run["dataset_name"] = moved[run["dataset_name"]]
    path = folder / RUN_FILE
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def _renamed(reward: str, moved: Mapping[str, str]) -> str:
    file, colon, function = reward.partition(":")
    return f"{moved.get(file, file)}{colon}{function}"
