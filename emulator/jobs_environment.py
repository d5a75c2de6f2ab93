"""What a job finds around it: command, environment, volumes and host names, as asked for or mapped."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucket_grpo.emulator.jobs_hardware import accelerator_of
from bucket_grpo.emulator.jobs_record import Job


@dataclass(frozen=True)
class Surroundings:
    """Args:
    endpoint: the Hub, as the job reaches it.
    token: what the job's mounts read and write with; the job itself gets only what it was sent.
    ports: exposed port → the port that the job must listen on. They differ for plain processes only.
    """

    endpoint: str
    token: str
    ports: Mapping[int, int]

    def of(self, job: Job) -> dict[str, Any]:
        """`command`, `env`, `mount_env` and `volumes` for the job's first process."""
        spec = job.spec
        isolated = job.address is not None
        paths = {} if isolated else {v.mount_path: str(job.folder / "volumes" / v.mount_path[1:]) for v in spec.volumes}
        home = "/tmp" if isolated else str(job.plain_home)
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "HF_ENDPOINT": self.endpoint,
            "JOB_ID": job.id,
            "ACCELERATOR": accelerator_of(spec.flavor),
            "CPU_CORES": str(os.cpu_count() or 1),
            "MEMORY": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30}Gi",
            **group_environment(job),
            **spec.environment,
            **spec.secrets,
        }
        mount_env = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HOME": home, "TMPDIR": home}
        return {
            "command": [mapped(word, paths, self.ports) for word in [*spec.command, *spec.arguments]],
            "env": {key: mapped(value, paths, self.ports) for key, value in env.items()},
            "mount_env": {**clean_environment(), **mount_env, "HF_HOME": f"{home}/.mount"},
            "volumes": [
                {
                    "source": "/".join(filter(None, (volume.source, (volume.path or "").strip("/")))),
                    "path": paths.get(volume.mount_path, volume.mount_path),
                    "read_only": volume.read_only,
                }
                for volume in spec.volumes
            ],
        }


def mapped(text: str, paths: Mapping[str, str], ports: Mapping[int, int]) -> str:
    """`text` with mount paths and exposed ports replaced by those that a plain process has instead."""
    for asked, given in paths.items():
        if text == asked or text.startswith(asked + "/"):
            return given + text[len(asked) :]
    if text.isdecimal() and int(text) in ports:
        return str(ports[int(text)])
    return text


def clean_environment() -> dict[str, str]:
    """What a job's first process needs of ours: no tokens, no caches, no settings of the user."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}


def group_environment(job: Job) -> dict[str, str]:
    if job.spec.network is None:
        return {}
    group = job.spec.network.group
    return {"HF_NETWORK_GROUP_HOSTNAME": f"{group}-members", "HF_NETWORK_GROUP_PREFIX": f"{group}-"}


def members_of(job: Job, jobs: Iterable[Job]) -> list[Job]:
    """The running jobs of the network group that `job` joined, itself among them while it runs."""
    if job.spec.network is None:
        return []
    group = (job.namespace, job.spec.network.group)
    return [
        other
        for other in jobs
        if other.address and other.spec.network and (other.namespace, other.spec.network.group) == group
    ]


def hosts_text(job: Job, members: Iterable[Job]) -> str:
    """The job's `/etc/hosts`: there is no name server, so it names every member of the group."""
    lines = [Path("/etc/hosts").read_text(), f"{job.address} {job.id}" if job.address else ""]
    for member in members:
        assert member.spec.network is not None
        group = member.spec.network.group
        names = [f"{group}-members", *(f"{group}-{alias}" for alias in member.spec.network.aliases)]
        lines.append(f"{member.address} {' '.join(names)}")
    return "\n".join(lines) + "\n"
