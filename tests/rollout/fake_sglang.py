"""A program that behaves like the host of `quadriga.rollout.sglang`, with faults on request.

It is run as `fake_sglang.py -m quadriga.rollout.sglang.host`. The faults are those of
`server_args["faults"]`, or of the last request to `/faults`.

A response repeats the last token of its prompt, once for each new token. Its log-probabilities are
-1, -2 and so on, plus the mean of the weight `model.norm.weight`.
"""

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from quadriga.rollout.base import tensor_digest
from quadriga.rollout.sglang.host import _end_with, end_group, name_shared_memory


class Fake:
    def __init__(self, args):
        self.faults = args.get("faults", {})
        self.version = args["weight_version"]
        self.args = args
        self.session = False
        self.lock = threading.Lock()
        self.generated = 0
        if self.faults.get("start"):
            print(
                "a warning\nRuntimeError: CUDA out of memory\nKilled", file=sys.stderr, flush=True
            )
            os._exit(1)
        folder = Path(args["model_path"])
        assert not (folder / "generation_config.json").exists()
        self.weights = load_file(folder / "model.safetensors")
        if self.faults.get("shared memory"):
            self.semaphore = multiprocessing.get_context("spawn").Lock()
            self.shared = shared_memory.SharedMemory(create=True, size=4096)
            names = f"sem.{self.semaphore._semlock.name[1:]}", self.shared.name.removeprefix("/")
            Path(self.faults["shared memory"]).write_text("\n".join(names))

    def handle(self, path, body, payload):
        if path == "/faults":
            self.faults = body
        elif path == "/generate":
            return self.generate(body)
        elif path == "/begin_weight_update":
            assert not self.session
            self.session = True
        elif path == "/update_weights_from_tensor":
            return self.update(body, payload)
        elif path == "/end_weight_update":
            assert self.session
            self.session = False
        elif path == "/update_weight_version":
            self.version = self.faults.get("version") or body["new_version"]
        return {"success": True, "message": ""}

    def update(self, body, payload):
        assert self.session
        payload = payload or b64decode(body["serialized_named_tensors"][0])
        if body["load_format"] == "quadriga.rollout.sglang.weights.answer":
            question = json.loads(bytes(pickle.loads(payload)[0][1].tolist()))
            held = {
                name: ("float32", str(tensor_digest(self.weights[name])))
                for name in question["shapes"]
            }
            Path(question["file"]).write_text(json.dumps({"held": held}))
            return {"success": True, "message": ""}
        bucket = pickle.loads(payload)
        for entry in bucket["metadata"]:
            part = bucket["flattened_tensor"][entry.start_idx : entry.end_idx]
            weight = part.view(entry.dtype).view(entry.shape)
            if entry.name == self.faults.get("refuse weight"):
                return {"success": False, "message": "no space"}
            self.weights[entry.name] = weight.clone()
        return {"success": True, "message": ""}

    def generate(self, body):
        with self.lock:
            self.generated += 1
            number = self.generated
        if number == self.faults.get("die at request"):
            print("Scheduler hit an exception: no memory", file=sys.stderr, flush=True)
            os._exit(1)
        if number == self.faults.get("stop at request"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if number == self.faults.get("wait at request"):
            time.sleep(600)
        sampling = body["sampling_params"]
        each = sampling if isinstance(sampling, list) else [sampling] * len(body["input_ids"])
        rows = [
            self.row(i, p, s) for i, (p, s) in enumerate(zip(body["input_ids"], each, strict=True))
        ]
        return rows[:-1] if self.faults.get("missing row") else rows

    def row(self, i, prompt, sampling):
        count = sampling["max_new_tokens"]
        shift = float(self.weights["model.norm.weight"].mean())
        ids = [prompt[-1]] * count
        reason = {"type": "length", "length": count}
        ends = [k for k, token in enumerate(ids) if token in sampling.get("stop_token_ids", [])]
        if ends:
            ids, reason = ids[: ends[0] + 1], {"type": "stop", "matched": ids[0]}
        log_probs = [[-k - 1 + shift, token, None] for k, token in enumerate(ids)]
        scores = [[None, prompt[0], None], *([-0.5 + shift, t, None] for t in prompt[1:])]
        info = {
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": count}],
            "finish_reason": reason,
            "output_token_logprobs": log_probs,
            "input_token_logprobs": scores,
        }
        info |= self.faults.get("info") or {}
        return {"output_ids": ids, "meta_info": info}


def serve(fake, rank):
    lock = threading.Lock()

    def answer(message, payload):
        try:
            body, status = fake.handle(message["path"], message["body"], payload), 200
        except Exception as error:
            body, status = {"message": repr(error)}, 400
        send({"id": message["id"], "status": status, "body": body})

    def send(message):
        with lock:
            rank.send_bytes(json.dumps(message).encode())

    send({"id": 0, "status": 200})
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(rank.recv_bytes()), rank.recv_bytes()
            threading.Thread(target=answer, args=request, daemon=True).start()


def http_server(fake, key):
    """A server of `HTTPTransport`, for a thread of a test."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"weight_version": fake.version})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            payload = b64decode(body.get("serialized_named_tensors", [""])[0])
            try:
                result = fake.handle(self.path, body, payload)
                failed = isinstance(result, dict) and not result["success"]
                self.answer(400 if failed else 200, result)
            except Exception as error:
                self.answer(400, {"message": repr(error)})

        def answer(self, status, content):
            if self.headers.get("Authorization") != f"Bearer {key}":
                status, content = 401, {"message": "wrong key"}
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main():
    torch.set_num_threads(1)
    number, folder = sys.argv[-2:]
    threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    rank = Connection(int(number))
    name_shared_memory(folder)
    fake = Fake(json.loads(rank.recv_bytes())["args"])
    subprocess.Popen(["sleep", "600"])  # a scheduler
    serve(fake, rank)
    end_group(os.getpgrp(), folder)


if __name__ == "__main__":
    main()
