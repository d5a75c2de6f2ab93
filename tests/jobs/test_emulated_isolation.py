"""Where namespaces can be had, a job has a machine of its own; whatever ends the Hub, nothing of its jobs lives on."""

import uuid
from pathlib import Path

import pytest

from tests.emulator.hubs import start_hub
from tests.jobs.emulated import NAMESPACES, Cluster, cluster, eventually, running_with

pytestmark = pytest.mark.skipif(not NAMESPACES, reason="network namespaces need root")


def bridge_of(hub: Cluster) -> Path:
    return Path(f"/sys/class/net/bgj{hub.hub.process.pid}")


def test_a_job_sees_neither_the_machines_processes_nor_its_network_nor_its_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "secret-of-the-host").touch()
    with cluster(tmp_path) as hub:
        job = hub.wait(
            hub.run(
                f"ls {tmp_path}; ls /proc | grep -c '^[0-9]'; ip -o link | wc -l; ls -d /lora",
                volumes=[hub.volume("b", read_only=True)],
            )
        )
        missing, processes, links, mount = hub.log(job)
    assert "No such file" in missing
    assert int(processes) < 20
    assert links == "2"
    assert mount == "/lora"
    assert not Path("/lora").exists()


def test_jobs_of_one_network_group_find_each_other_by_name(tmp_path: Path) -> None:
    with cluster(tmp_path) as hub:
        server = hub.run("exec python3 -m http.server 9000", network_group="g", network_aliases=["a"])
        hub.wait(server, "RUNNING")
        code = (
            "import os, urllib.request as u, time\n"
            "url = 'http://' + os.environ['HF_NETWORK_GROUP_PREFIX'] + 'a:9000/'\n"
            "for _ in range(50):\n"
            "    try: print(u.urlopen(url, timeout=2).status); break\n"
            "    except OSError: time.sleep(0.1)\n"
        )
        client = hub.wait(hub.run("", command=["python3", "-c", code], network_group="g"))
        assert hub.log(client) == ["200"]
        hub.api.cancel_job(job_id=server.id, namespace="me")


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_when_the_hub_ends_so_do_its_jobs(tmp_path: Path, how: str) -> None:
    mark = uuid.uuid4().hex
    hub = Cluster(start_hub(tmp_path / "hub", "--profile", "local"), namespaces=True)
    job = hub.run(f"(setsid sh -c 'sleep 300; : {mark}') & sleep 300", volumes=[hub.volume("b", read_only=True)])
    hub.wait(job, "RUNNING")
    assert eventually(lambda: bool(running_with(mark)))
    (hub.hub.stop if how == "stop" else hub.hub.kill)()
    assert eventually(lambda: not running_with(mark))
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(tmp_path) in line]
    again = Cluster(start_hub(tmp_path / "hub", "--profile", "local"), namespaces=True)
    try:
        assert again.inspect(job).status.stage == "ERROR"
        assert not bridge_of(hub).exists(), "a killed Hub's bridge is removed by the next one"
        assert bridge_of(again).exists()
    finally:
        again.hub.stop()
    assert not bridge_of(again).exists()
