"""One job as it is asked for: the arguments of `huggingface_hub.run_job`, and the body that it makes of them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucket_grpo.jobs.labels import JobName
from bucket_grpo.jobs.settings import seconds

HIDDEN = "********"


@dataclass(frozen=True)
class BucketVolume:
    """A bucket, or a folder in it, mounted at `mount_path`."""

    bucket: str
    mount_path: str
    read_only: bool
    path: str | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"type": "bucket", "source": self.bucket, "mountPath": self.mount_path}
        body["readOnly"] = self.read_only
        return body if self.path is None else body | {"path": self.path}


@dataclass(frozen=True)
class JobRequest:
    """Everything about one job but its secrets' values, which are added when it is posted."""

    namespace: str
    name: JobName
    image: str
    command: list[str]
    flavor: str
    timeout: str
    env: dict[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()
    volumes: tuple[BucketVolume, ...] = ()
    expose: tuple[int, ...] = ()
    attempts: int | None = None
    network_group: str | None = None
    network_aliases: tuple[str, ...] = ()

    @property
    def timeout_s(self) -> int:
        return seconds(self.timeout)

    def arguments(self, secrets: Mapping[str, str], run_job: Callable[..., Any]) -> dict[str, Any]:
        """The keyword arguments for `run_job`, whichever major version of the client it belongs to.

        Raises `ValueError` if a secret has no value. `attempts` is left out where the client does not know it: the
        launcher and the trainer job restart what was lost in any case.
        """
        from huggingface_hub import Volume

        missing = [name for name in self.secret_names if not secrets.get(name)]
        if missing:
            raise ValueError(f"secret {missing[0]} of job {self.name.part} has no value: export {missing[0]}=…")
        arguments: dict[str, Any] = {
            "image": self.image,
            "command": self.command,
            "env": self.env,
            "secrets": {name: secrets[name] for name in self.secret_names},
            "flavor": self.flavor,
            "timeout": self.timeout_s,
            "labels": self.name.labels,
            "volumes": [
                Volume(
                    type="bucket",
                    source=volume.bucket,
                    mount_path=volume.mount_path,
                    read_only=volume.read_only,
                    path=volume.path,
                )
                for volume in self.volumes
            ],
            "expose": list(self.expose) or None,
            "namespace": self.namespace,
        }
        if self.network_group:
            arguments |= {"network_group": self.network_group, "network_aliases": list(self.network_aliases) or None}
        if self.attempts is not None and "attempts" in inspect.signature(run_job).parameters:
            arguments["attempts"] = self.attempts
        return arguments

    def shown(self) -> dict[str, Any]:
        """The request as JSON, for people: what is posted, with every secret's value hidden."""
        body: dict[str, Any] = {
            "command": self.command,
            "arguments": [],
            "environment": self.env,
            "flavor": self.flavor,
        }
        if self.secret_names:
            body["secrets"] = dict.fromkeys(self.secret_names, HIDDEN)
        body["timeoutSeconds"] = self.timeout_s
        body["labels"] = self.name.labels
        if self.volumes:
            body["volumes"] = [volume.body() for volume in self.volumes]
        if self.expose:
            body["expose"] = {"ports": list(self.expose)}
        if self.network_group:
            network: dict[str, Any] = {"group": self.network_group}
            body["network"] = network | ({"aliases": list(self.network_aliases)} if self.network_aliases else {})
        body["dockerImage"] = self.image
        return {"method": "POST", "path": f"/api/jobs/{self.namespace}", "body": body}
