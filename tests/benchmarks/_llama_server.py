"""Stands for llama-server: a real HTTP server that speaks its documented JSON, run by path as a program.

    _llama_server.py -m BASE.gguf --lora A.gguf ... --lora-init-without-apply -np N -c N ... --port P

What it answers is in ANSWERS, a JSON file beside BASE.gguf: a list of {prompt, lora, tokens}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = "answers.json"
STARTED = time.monotonic()
LOADING_S = 0.3


def main() -> None:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("-m", type=Path, required=True)
    made.add_argument("--lora", action="append", default=[])
    made.add_argument("--lora-init-without-apply", action="store_true", required=True)
    for flag in ("-np", "-c", "-t", "-tb", "--port"):
        made.add_argument(flag, type=int, required=True)
    for flag, value in (("-ctk", "f32"), ("-ctv", "f32"), ("-fa", "off")):
        made.add_argument(flag, choices=[value], required=True)
    made.add_argument("--host", required=True)
    args = made.parse_args()
    if not args.m.exists():
        sys.exit("error: failed to open GGUF file")
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.args = args  # type: ignore[attr-defined]
    known = json.loads((args.m.parent / ANSWERS).read_text())
    server.answers = {(tuple(a["prompt"]), a["lora"]): a["tokens"] for a in known}  # type: ignore[attr-defined]
    server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """The four endpoints that the benchmark uses."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            if time.monotonic() - STARTED < LOADING_S:
                self._say(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
            else:
                self._say(200, {"status": "ok"})
        elif self.path == "/props":
            self._say(200, {"total_slots": self.server.args.np, "build_info": "b1-test"})
        elif self.path == "/lora-adapters":
            paths = enumerate(self.server.args.lora)
            self._say(200, [{"id": i, "path": path, "scale": 1.0} for i, path in paths])
        else:
            self._say(404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrong = self.path != "/completion" or not body["return_tokens"] or body["cache_prompt"] or body["temperature"]
        # as the real one: it has loaded all adapters at scale 1, and where none is named all of them act
        scales = {entry["id"]: entry["scale"] for entry in body["lora"]}
        lora = [i for i in range(len(self.server.args.lora)) if scales.get(i, 0.0 if scales else 1.0) == 1.0]
        tokens = self.server.answers.get((tuple(body["prompt"]), lora[0] if lora else None))
        if wrong or len(lora) > 1 or not body["ignore_eos"] or (tokens is None and not body.get("n_probs")):
            self._say(400, {"error": {"code": 400, "message": "unknown", "type": "invalid_request_error"}})
            return
        answer = {"content": "", "tokens": (tokens or [])[: body["n_predict"] + 1], "stop": True, "timings": {}}
        if body.get("n_probs"):
            top = [{"id": 7, "logprob": -1.0}, {"id": 8, "logprob": -1.0005}, {"id": 9, "logprob": -3.0}]
            answer["completion_probabilities"] = [{"id": 7, "logprob": -1.0, "top_logprobs": top}]
        self._say(200, answer)

    def _say(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""


if __name__ == "__main__":
    main()
