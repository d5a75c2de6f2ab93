"""Stands in for vLLM where a failure can't be provoked in the real one: `python fake_vllm.py --port N …vLLM's flags…`.

It takes vLLM's command line and speaks the part of its HTTP API that the agent uses. The folder in `FAKE_VLLM` scripts
it: a file there named after a misbehaviour switches it on, and `calls.jsonl` records what was asked.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zlib import crc32

SCRIPT = Path(os.environ.get("FAKE_VLLM", "."))
FLAGS = argparse.ArgumentParser()
FLAGS.add_argument("--port", type=int)
FLAGS.add_argument("--served-model-name")
FLAGS.add_argument("--dtype")
FLAGS.add_argument("--max-lora-rank", type=int)
FLAGS.add_argument("--max-loras", type=int)
FLAGS.add_argument("--max-cpu-loras", type=int)
FLAGS.add_argument("--max-model-len", type=int, default=1024)


def said(name: str) -> str | None:
    """What the script says of `name`, or None where it is silent."""
    path = SCRIPT / name
    return path.read_text() if path.exists() else None


def on(name: str) -> bool:
    return (SCRIPT / name).exists()


def said_once(name: str) -> str | None:
    text = said(name)
    if text is not None:
        (SCRIPT / name).unlink()
    return text


def expected_logprobs(weights: bytes | None, prompt: list[int]) -> list[float]:
    """A model of our own: any function of weights and tokens will do, as long as different weights answer otherwise."""
    salt = 0 if weights is None else crc32(weights)
    return [-1.0 - (crc32(f"{salt}:{prompt[: i + 1]}".encode()) % 1000) / 1000 for i in range(1, len(prompt))]


class State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.adapters: dict[str, str] = {}
        self.generated = 0


state = State()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self.answer(200, "")
        elif path == "/metrics":
            self.answer(200, f'vllm:generation_tokens_total{{engine="0"}} {state.generated}\nother_metric 1\n')
        elif path == "/server_info":
            self.answer(200, {"vllm_config": server_config()})
        elif path == "/v1/models":
            base = {"id": args.served_model_name, "root": "/base", "max_model_len": args.max_model_len}
            loaded = [{"id": name, "root": root, "parent": base["id"]} for name, root in state.adapters.items()]
            self.answer(200, {"data": [base, *loaded]})
        else:
            self.answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with state.lock, (SCRIPT / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps({"path": self.path, **body}) + "\n")
        {
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
            "/v1/completions": self.complete,
        }.get(self.path, lambda _: self.answer(404, {"error": {"message": "no such route"}}))(body)

    def load(self, body: dict) -> None:
        name, path = body["lora_name"], body["lora_path"]
        if said("die_on_load") and said("die_on_load") in name:
            die("RuntimeError: this adapter kills the engine")
        refusal = said("refuse_load") or said_once("refuse_load_once")
        if refusal:
            self.answer(500, {"error": {"message": refusal}})
            return
        if name in state.adapters:
            self.answer(400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}})
            return
        if said_once("answer_load_late_once"):
            state.adapters[name] = path
            time.sleep(1.0)
        if said_once("load_late_once"):
            time.sleep(1.0)
        state.adapters[name] = path
        self.answer(200, f"Success: LoRA adapter '{name}' added successfully.")

    def unload(self, body: dict) -> None:
        if said_once("refuse_unload_once"):
            self.answer(500, {"error": {"message": "not now"}})
            return
        if state.adapters.pop(body["lora_name"], None) is None:
            self.answer(404, {"error": {"message": "no such adapter"}})
        else:
            self.answer(200, "Success")

    def complete(self, body: dict) -> None:
        if on("die_on_completion"):
            die("RuntimeError: CPU Generator does not use offset")
        if on("die_in_the_middle_of_an_answer"):
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"half": ')
            self.wfile.flush()
            time.sleep(0.2)
            die("RuntimeError: no more words")
        while on("stall"):
            time.sleep(0.05)
        model, prompt = body["model"], body["prompt"]
        root = state.adapters.get(model)
        weights = None if root is None or on("serve_base") else (Path(root) / "adapter_model.safetensors").read_bytes()
        logprobs = expected_logprobs(weights, prompt)
        time.sleep(body.get("seconds", 0))
        with state.lock:
            state.generated += body["max_tokens"]
        choice = {"text": "x", "token_ids": [1] * body["max_tokens"], "finish_reason": "length"}
        if "prompt_logprobs" in body:
            entries = zip(prompt[1:], logprobs, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": value}} for token, value in entries)]
        self.answer(200, {"model": model, "choices": [choice]})


def server_config() -> dict:
    return {
        "model_config": {
            "dtype": said("dtype") or f"torch.{args.dtype}",
            "max_model_len": args.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        },
        "lora_config": {
            "max_lora_rank": args.max_lora_rank,
            "max_loras": args.max_loras,
            "max_cpu_loras": args.max_cpu_loras,
            "lora_dtype": f"torch.{args.dtype}",
        },
        "parallel_config": {"data_parallel_size": 1},
        "scheduler_config": {"enable_chunked_prefill": False},
    }


def die(last_words: str) -> None:
    print("Traceback (most recent call last):", file=sys.stderr)
    print(last_words, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    args, _ = FLAGS.parse_known_args()
    if said("die_at_start"):
        die(said("die_at_start") or "")
    (SCRIPT / "pid").write_text(str(os.getpid()))
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
