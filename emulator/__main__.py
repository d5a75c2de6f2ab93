"""`python -m bucket_grpo.emulator`: `mount` a bucket as HF Jobs do, and `serve` a Hub to mount it from."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command()
def mount(
    source: Annotated[str, typer.Argument(help="a folder of objects, or a bucket id `ns/name` with --endpoint")],
    path: Annotated[Path, typer.Argument(help="where to mount it")],
    read_only: Annotated[bool, typer.Option("--read-only")] = False,
    profile: Annotated[str, typer.Option(help="hf-mount-2026-09, hf-mount-2026-08 or local")] = "hf-mount-2026-09",
    time_scale: Annotated[float, typer.Option(help="multiply every second of the profile")] = 1.0,
    setting: Annotated[list[str] | None, typer.Option("--set", help="profile field, e.g. upload_bandwidth=5e6")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="name=value, e.g. fail_commits=1/2; may be repeated")] = None,
    control: Annotated[Path | None, typer.Option(help="JSON file of faults, read again whenever it changes")] = None,
    fuse: Annotated[bool, typer.Option(help="--no-fuse: mirror into a plain folder with the same delays")] = True,
    endpoint: Annotated[str | None, typer.Option(help="the Hub of a bucket id; the token comes from HF_TOKEN")] = None,
) -> None:
    """Mount SOURCE at PATH; prints `mounted PATH`, then serves until SIGTERM (which flushes)."""
    from bucket_grpo.emulator.backends import open_backend
    from bucket_grpo.emulator.faults import FaultControl, parse_faults
    from bucket_grpo.emulator.profiles import profile_named

    try:
        times = profile_named(profile).with_overrides(setting or []).scaled(time_scale)
        faults = FaultControl(parse_faults(fault or []), control.absolute() if control else None)
        backend = open_backend(source, endpoint)
    except (ValueError, OSError) as error:
        print(f"cannot mount {source}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if fuse:
        from bucket_grpo.emulator.mount_process import run_mount

        raise typer.Exit(run_mount(backend, source, path.absolute(), times, read_only=read_only, control=faults))
    from bucket_grpo.emulator.mount_plain import run_plain

    raise typer.Exit(run_plain(backend, path.absolute(), times, read_only=read_only, control=faults))


@app.command()
def serve(
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one")] = 0,
    root: Annotated[Path, typer.Option(help="where buckets and their contents are kept")] = Path("hub"),
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    user: Annotated[list[str] | None, typer.Option(help="a user to have (default: me); may be repeated")] = None,
    org: Annotated[list[str] | None, typer.Option(help="an organization that new users belong to")] = None,
    fault: Annotated[list[str] | None, typer.Option(help='JSON, e.g. {"kind":"status","status":429}')] = None,
    profile: Annotated[str, typer.Option(help="how buckets behave that are mounted in jobs")] = "hf-mount-2026-09",
    time_scale: Annotated[float, typer.Option(help="multiply every second of the profile")] = 1.0,
    schedule_s: Annotated[float, typer.Option(help="seconds that a job waits for its machine")] = 0.2,
    flush_grace_s: Annotated[float, typer.Option(help="seconds that a job's mounts may flush at its end")] = 10.0,
    namespaces: Annotated[bool, typer.Option(help="--no-namespaces: jobs are plain processes")] = True,
) -> None:
    """A local Hub: jobs, buckets, content-addressed storage, tokens. Use it through HF_ENDPOINT and HF_TOKEN."""
    from bucket_grpo.emulator.hub import HubInUse
    from bucket_grpo.emulator.hub import serve as serve_hub
    from bucket_grpo.emulator.jobs_runner import JobOptions

    jobs = JobOptions(
        namespaces=namespaces,
        schedule_s=schedule_s,
        flush_grace_s=flush_grace_s,
        mount_options=["--profile", profile, "--time-scale", str(time_scale)],
    )

    try:
        serve_hub(root, host, port, users=user or ["me"], orgs=org or [], faults=fault or [], jobs=jobs)
    except (HubInUse, ValueError, OSError) as error:
        print(f"cannot serve {root} on {host}:{port}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
