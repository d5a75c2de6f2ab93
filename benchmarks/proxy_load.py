"""How fast is the proxy, and what does it add? Compared with a minimal aiohttp proxy and with vllm-router.

Two upstreams that answer at once (2 KB prompts of token ids, 1.6 KB answers, 8 requests a prompt). The proxy under test
has one core, load and upstreams have another. Rounds alternate between the proxies, and medians are printed.

    python -m venv /tmp/router && /tmp/router/bin/pip install --no-deps vllm-router==0.1.17
    /tmp/router/bin/pip install setproctitle aiohttp orjson uvicorn fastapi requests
    python benchmarks/proxy_load.py --vllm-router /tmp/router/bin/vllm-router --json

Without `--vllm-router` only the first two are compared. `--parts memory` watches the memory for ten minutes.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from instant_http import InstantUpstream, Measured, drive

from bucket_grpo.bucket_sync.vocabulary import VersionRef, served_name

RUN, INCARNATION = "bench", "20260101t000000z-000000"
ROOT = Path(__file__).resolve().parent.parent


class ProxyProcess:
    """One of the proxies, on the first core, in front of `upstreams`."""

    def __init__(self, kind: str, upstreams: list[str], router_command: str | None) -> None:
        self.kind, self.port = kind, free_port()
        self.model = "trl-policy-v1" if kind == "ours" else "tiny"
        self._folder = tempfile.TemporaryDirectory(prefix=f"proxy-load-{kind}-")
        folder = Path(self._folder.name)
        if kind == "ours":
            config = {
                "run": RUN,
                "incarnation": INCARNATION,
                "base_model": "tiny",
                "replicas": upstreams,
                "journal_dir": str(folder / "journal"),
                "port": self.port,
            }
            (folder / "proxy.json").write_text(json.dumps(config))
            command = [sys.executable, "-m", "bucket_grpo.proxy", "--config", str(folder / "proxy.json")]
        elif kind == "aiohttp":
            command = [sys.executable, str(ROOT / "benchmarks/reference_proxy.py"), str(self.port), *upstreams]
        else:
            command = [str(router_command), "--host", "127.0.0.1", "--port", str(self.port)]
            command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware", "--log-level", "error"]
            command += ["--worker-urls", *upstreams]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            preexec_fn=lambda: os.sched_setaffinity(0, {0}),
        )

    async def ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.close()
            if self.kind == "ours":
                await self._announce()
            await asyncio.sleep(0.5)
            return
        raise RuntimeError(f"{self.kind} did not start: {Path(self._log.name).read_text()[-2000:]}")

    async def _announce(self) -> None:
        ref = VersionRef(run=RUN, incarnation=INCARNATION, number=1, sha256="0" * 64, size=1, step=0)
        body = ref.model_dump_json().encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST /versions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        status = (await reader.readline()).split()[1]
        writer.close()
        if status != b"202":
            raise RuntimeError(f"the version was not accepted: {status!r}")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._folder.cleanup()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.kinds = ["ours", "aiohttp"] + (["vllm_router"] if options.vllm_router else [])
        self.errors = 0

    async def upstreams(self, delay_s: float) -> list[str]:
        loop = asyncio.get_running_loop()
        versions = [served_name(RUN, INCARNATION, 1)]
        urls = []
        for name in ("a", "b"):
            server = await loop.create_server(
                lambda name=name: InstantUpstream(name, versions, delay_s),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=1024,
            )
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return urls

    async def measure(self, kind: str, urls: list[str], in_flight: int, seconds: float) -> Measured:
        proxy = ProxyProcess(kind, urls, self.options.vllm_router)
        try:
            await proxy.ready()
            cpu_s = proxy.cpu_s()
            measured = await drive(proxy.port, proxy.model, in_flight, seconds)
            cpu_us = (proxy.cpu_s() - cpu_s) / (measured.count or 1) * 1e6
        finally:
            proxy.stop()
        self.errors += measured.errors
        self.say(
            f"{kind:12} {in_flight:4} in flight: {measured.rps:8.0f} /s, p50 {measured.quantile(0.5) * 1e3:7.1f} ms,"
            f" p99 {measured.quantile(0.99) * 1e3:7.1f} ms,"
            f" {cpu_us:.0f} us of CPU a request, {measured.errors} errors"
        )
        return measured

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def throughput(self) -> dict[str, object]:
        urls = await self.upstreams(0.0)
        runs: dict[tuple[str, int], list[Measured]] = {}
        for pair in range(self.options.pairs):
            for kind in self.kinds if pair % 2 == 0 else reversed(self.kinds):
                for in_flight in (128, 384):
                    measured = await self.measure(kind, urls, in_flight, self.options.seconds)
                    runs.setdefault((kind, in_flight), []).append(measured)

        def median(in_flight: int, figure: str) -> dict[str, float]:
            return {
                kind: round(
                    statistics.median(
                        run.rps if figure == "rps" else run.quantile(0.99) for run in runs[(kind, in_flight)]
                    ),
                    4,
                )
                for kind in self.kinds
            }

        return {"rps_128": median(128, "rps"), "rps_384": median(384, "rps"), "p99_384_s": median(384, "p99")}

    async def added(self) -> dict[str, float]:
        """What the proxy adds to upstreams that take 500 ms, over asking such an upstream directly."""
        urls = await self.upstreams(0.5)
        direct = await drive(int(urls[0].rsplit(":", 1)[1]), "tiny", 384, self.options.seconds)
        ours = await self.measure("ours", urls, 384, self.options.seconds)
        return {
            "added_p50_s": round(ours.quantile(0.5) - direct.quantile(0.5), 5),
            "added_p99_s": round(ours.quantile(0.99) - direct.quantile(0.99), 5),
        }

    async def memory(self) -> dict[str, float]:
        """Resident memory of the proxy after the first tenth and at the end of a long run at full load."""
        urls = await self.upstreams(0.0)
        proxy = ProxyProcess("ours", urls, None)
        try:
            await proxy.ready()
            samples = []
            for part in range(10):
                measured = await drive(proxy.port, proxy.model, 128, self.options.soak_s / 10)
                samples.append(proxy.rss_mib())
                self.say(f"memory after {part + 1}/10: {samples[-1]:.1f} MiB at {measured.rps:.0f} /s")
        finally:
            proxy.stop()
        return {"rss_start_mib": round(samples[0], 1), "rss_end_mib": round(samples[-1], 1)}

    async def run(self) -> dict[str, object]:
        result: dict[str, object] = {"benchmark": "proxy_load", "pairs": self.options.pairs}
        if "load" in self.options.parts:
            result |= await self.throughput()
        if "added" in self.options.parts:
            result |= await self.added()
        if "memory" in self.options.parts:
            result |= await self.memory()
        return {**result, "errors": self.errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="alternating rounds")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--soak-s", type=float, default=600.0, help="of the memory part")
    parser.add_argument("--parts", default="load,added", type=lambda text: text.split(","), help="load,added,memory")
    parser.add_argument("--vllm-router", help="its command, in an environment of its own (pip install vllm-router)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[1]})
    result = uvloop.run(Bench(options).run())
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}")
    return 0 if result["errors"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
