"""The proxy's control API on a real socket, with answers that a test scripts: what a real fleet can't be made to do."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bucket_grpo.bucket_sync.vocabulary import VersionRef


class ScriptedProxy:
    """`answer(ref)` returns the `VersionLiveness` fields of a version each time that it is asked for."""

    def __init__(self, answer: Callable[[VersionRef], dict] | None = None, port: int = 0) -> None:
        self.answer = answer or (lambda ref: {"state": "live"})
        self.announced: list[VersionRef] = []
        self.retired: list[str] = []
        self.forget = threading.Event()
        self._known: dict[str, VersionRef] = {}
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def reply(self, status: int, body: dict) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/versions":
                    ref = VersionRef(**body)
                    proxy.announced.append(ref)
                    proxy._known[ref.name] = ref
                    self.reply(202, {})
                elif self.path == "/v1/unload_lora_adapter":
                    proxy.retired.append(body["lora_name"])
                    self.reply(200, {})

            def do_GET(self) -> None:
                name = self.path.split("?")[0].removeprefix("/versions/")
                if proxy.forget.is_set():
                    proxy.forget.clear()
                    proxy._known.clear()
                if name not in proxy._known:
                    self.reply(404, {"error": f"{name} was never announced"})
                else:
                    self.reply(200, {"name": name, **proxy.answer(proxy._known[name])})

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
