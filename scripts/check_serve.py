#!/usr/bin/env python3
"""The `openai` client and clients that misbehave, against `pipeline serve` on the quickstart's model and its adapter.

    python3 -m venv client && client/bin/pip install openai
    cargo build --release
    client/bin/python scripts/check_serve.py [--clients 64] [--seconds 20]

The model is made by `pipelines/quickstart.yaml`. Checked are models and errors, whole and streamed answers with usage, log-probabilities, seeds, stop texts,
both models of an adapter in turn, a key that is wrong, a full queue, clients that go away or send half a request, garbage, the memory after a load
of many clients, and a server that completes what is in progress when it is asked to end.
"""

import argparse
import concurrent.futures
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
KEY = "key of this check"
# Qwen's form of calls, in fewer tokens: the model has 256 positions.
TOOLS_TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
QUESTION = [{"role": "user", "content": "Who are you?"}]


class Server:
    """`pipeline serve` of an adapter, on a port of its own."""

    def __init__(self, home, *arguments, template="chatml"):
        command = [PIPELINE, "serve", ROOT / "pipelines/quickstart.yaml", "adapter", "--home", home, "--port", "0",
                   "--chat-template", template, *arguments]
        environment = {**os.environ, "SERVE_KEY": KEY}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        line = next((line for line in self.process.stderr if line.startswith("serving ")), None)
        if line is None:
            raise SystemExit("it does not serve")
        self.address = line.rsplit("http://", 1)[1].strip().removesuffix("/v1")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.client = openai.OpenAI(base_url=f"http://{self.address}/v1", api_key=KEY, max_retries=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def get(self, path):
        request = urllib.request.Request(f"http://{self.address}{path}", headers={"Authorization": f"Bearer {KEY}"})
        return urllib.request.urlopen(request).read().decode()

    def status(self, path, body):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        try:
            return urllib.request.urlopen(urllib.request.Request(f"http://{self.address}{path}", body, headers)).status
        except urllib.error.HTTPError as error:
            return error.code

    def metrics(self):
        lines = self.get("/metrics").splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def memory(self):
        """What it holds, in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def send(self, data):
        host, port = self.address.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), timeout=20)
        connection.sendall(data)
        return connection

    def chat(self, model="adapter", **options):
        return self.client.chat.completions.create(model=model, messages=QUESTION, **{"max_tokens": 24, "temperature": 0, **options})

    def is_idle(self):
        """Whether all places are free again, within ten seconds."""
        for _ in range(100):
            if all(value == 0 for name, value in self.metrics().items() if name.endswith(("requests_waiting", "requests_in_progress"))):
                return True
            time.sleep(0.1)
        return False


def expect(what, holds, found=""):
    print(f"  {'ok' if holds else 'WRONG'}  {what}{f': {found}' if found else ''}", flush=True)
    if not holds:
        raise SystemExit(1)


def status_of(call):
    try:
        call()
        return 200, None
    except openai.APIStatusError as error:
        return error.status_code, error


def answers(server):
    names = [model.id for model in server.client.models.list()]
    expect("models", names[0] == "adapter" and len(names) == 2, names)
    base = names[1]
    whole = server.chat()
    text = whole.choices[0].message.content
    expect("an answer", bool(text) and whole.usage.completion_tokens > 0, repr(text))
    pieces = list(server.chat(stream=True, stream_options={"include_usage": True}))
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    expect("streamed, the same", streamed == text)
    expect("usage at the end of a stream", pieces[-1].usage == whole.usage)
    scored = server.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expect("log-probabilities", all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in scored))
    sampled = [server.chat(temperature=1, seed=7).choices[0].message.content for _ in range(2)]
    expect("a seed is answered the same", sampled[0] == sampled[1])
    several = server.chat(n=3, temperature=1, seed=7)
    expect("three choices", len(several.choices) == 3 and several.choices[0].message.content == sampled[0])
    stopped = server.chat(stop=[text[3:6]])
    expect("a stop text", stopped.choices[0].message.content == text[: text.index(text[3:6])] and stopped.choices[0].finish_reason == "stop")
    echoed = server.client.completions.create(model=base, prompt="Pip is", max_tokens=0, echo=True, logprobs=1)
    lists = echoed.choices[0].logprobs
    expect("echo with log-probabilities", echoed.choices[0].text == "Pip is" and lists.token_logprobs[0] is None and lists.token_logprobs[1] < 0)
    both = [server.chat(model=name).choices[0].message.content for name in (names[0], base, names[0])]
    expect("adapter and base", both[0] == both[2] and both[0] != both[1], both[:2])
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        mixed = list(pool.map(lambda index: server.chat(model=names[index % 2]).choices[0].message.content, range(32)))
    expect("both among each other, as alone", mixed == both[:2] * 16)


def structured(home):
    """JSON, and calls of tools, by the grammar alone: this model has learned neither."""
    with Server(home, "--api-key-env", "SERVE_KEY", template=TOOLS_TEMPLATE) as server:
        schema = {"type": "object", "properties": {"name": {"enum": ["Pip", "Pup"]}}, "required": ["name"], "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        answer = server.chat(response_format=form, max_tokens=80).choices[0]
        found = json.loads(answer.message.content)
        expect("an answer by a schema", answer.finish_reason == "stop" and found["name"] in ("Pip", "Pup"), answer.message.content)
        tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
        answer = server.chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=80).choices[0]
        call = answer.message.tool_calls[0]
        expect("a call of a tool", answer.finish_reason == "tool_calls" and call.function.name == "look_up", call.function.arguments)
        pieces = list(server.chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=80, stream=True))
        streamed = next(piece.choices[0].delta.tool_calls[0] for piece in pieces if piece.choices and piece.choices[0].delta.tool_calls)
        expect("streamed, the same", streamed.function.arguments == call.function.arguments)
        messages = [*QUESTION, answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "found"}]
        again = server.client.chat.completions.create(model="adapter", messages=messages, tools=[tool], max_tokens=8)
        expect("its result goes back", again.choices[0].finish_reason in ("stop", "length", "tool_calls"))


def errors(server):
    for wrong, options in [
        ("model", {"model": "nobody"}),
        ("temperature", {"temperature": -1}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("no_such", {"extra_body": {"no_such": 1}}),
    ]:
        status, error = status_of(lambda options=options: server.chat(**options))
        expect(f"`{wrong}` is named", status in (400, 404) and error.body["param"] == wrong, f"{status} {error.body['message']}")
    stranger = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="wrong", max_retries=0)
    expect("a wrong key", status_of(stranger.models.list)[0] == 401)
    long = status_of(lambda: server.client.chat.completions.create(model="adapter", messages=[{"role": "user", "content": "word " * 20_000}]))
    expect("a prompt longer than the model", long[0] in (400, 413), long[1].body["message"])


def head(path, length, more=""):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n"


def misbehaviour(server, requests):
    body = json.dumps({"model": "adapter", "messages": QUESTION, "max_tokens": 100, "temperature": 1, "ignore": 1})
    good = json.dumps({"model": "adapter", "messages": QUESTION, "max_tokens": 100, "temperature": 1, "stream": True})
    gone = [server.send((head("/v1/chat/completions", len(good)) + good).encode()) for _ in range(50)]
    for connection in gone:
        connection.close()
    half = [server.send((head("/v1/chat/completions", len(body)) + body[:20]).encode()) for _ in range(20)]
    silent = [server.send(b"POST /v1/chat/comp") for _ in range(20)]
    slow = [server.send((head("/v1/chat/completions", len(good)) + good).encode()) for _ in range(4)]
    began = time.perf_counter()
    expect("answered beside them", bool(server.chat().choices), f"after {time.perf_counter() - began:.2f} s")
    for connection in half + silent + slow:
        connection.close()
    expect("all places are free again", server.is_idle())
    expect("garbage by OpenAPI is refused, and nothing fails", *garbage_by_openapi(server, requests))
    stream = random.Random(1)
    statuses = {}
    for _ in range(requests):
        text = list(good if stream.random() < 0.5 else body)
        for _ in range(stream.randint(1, 8)):
            text[stream.randrange(len(text))] = stream.choice('{}[]",:0\\\x00é👍e-')
        data = "".join(text).encode()
        path = stream.choice(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/nothing"])
        connection = server.send(head(path, len(data), "Connection: close\r\n").encode() + data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        connection.close()
        status = answer[9:12].decode() or "none"
        statuses[status] = statuses.get(status, 0) + 1
    expect("garbage is refused, and nothing fails", not any(status.startswith(("5", "n")) for status in statuses), statuses)


def garbage_by_openapi(server, requests):
    """Requests of fields that there are, with values that are seldom right."""
    paths = json.loads(server.get("/openapi.json"))["paths"]
    bodies = {path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"] for path, methods in paths.items() if "post" in methods}
    values = [None, True, 0, -1, 1, 1.5, 1e308, "", "x", "adapter", "é\0\U0001f44d", [], {}, [1, 2], ["a", ""], [[]], {"type": "json_object"}, {"a": {"b": []}}, QUESTION]
    draw = random.Random(2)
    statuses = {}
    for _ in range(requests):
        path = draw.choice(list(bodies))
        body = {name: draw.choice(values) for name in bodies[path] if draw.random() < 0.4} | {"max_tokens": draw.choice([1, 2, -1, "x"])}
        good = {"model": "adapter", "messages": QUESTION, "prompt": "Pip"}
        body |= {name: value for name, value in good.items() if name in bodies[path] and draw.random() < 0.7}
        status = server.status(path, json.dumps(body).encode())
        statuses[status] = statuses.get(status, 0) + 1
    return not any(status >= 500 for status in statuses), statuses


def full_queue(home):
    with Server(home, "--api-key-env", "SERVE_KEY", "--max-concurrency", "1", "--queue", "1") as server:
        def ask(_):
            return status_of(lambda: server.chat(max_tokens=60, temperature=1, stop=[]))

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            found = list(pool.map(ask, range(12)))
        refused = [error for status, error in found if status == 429]
        expect("a full queue", refused and all(status in (200, 429) for status, _ in found), f"{len(refused)} of 12 refused")
        expect("with Retry-After", all(int(error.response.headers["retry-after"]) > 0 for error in refused))
        expect("and goes on", server.is_idle() and status_of(server.chat)[0] == 200)


def load(server, clients, seconds):
    end = time.perf_counter() + seconds
    first, between, count, lost = [], [], 0, []
    lock = threading.Lock()
    before = None

    def ask(number):
        nonlocal count, before
        client = openai.OpenAI(base_url=f"http://{server.address}/v1", api_key=KEY, max_retries=0)
        while time.perf_counter() < end:
            last = time.perf_counter()
            gaps, finish = [], None
            try:
                for piece in client.chat.completions.create(model="adapter", messages=QUESTION, max_tokens=24, temperature=1, seed=number, stream=True):
                    if piece.choices[0].delta.content:
                        now = time.perf_counter()
                        gaps.append(now - last)
                        last = now
                    finish = piece.choices[0].finish_reason or finish
            except openai.APIError as error:
                with lock:
                    lost.append(repr(error))
                continue
            with lock:
                count += 1
                first.extend(gaps[:1])
                between.extend(gaps[1:])
                if finish is None:
                    lost.append("no end")
                if count == clients:
                    before = server.memory()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(f"{clients} clients for {seconds} s, nothing lost", not lost and count > clients, f"{count} answers {lost[:2]}")
    quantile = lambda values, share: sorted(values)[int(share * (len(values) - 1))] * 1000
    print(f"      first text p50 {quantile(first, 0.5):.0f} ms, p99 {quantile(first, 0.99):.0f} ms; between texts p50 {quantile(between, 0.5):.1f}, "
          f"p99 {quantile(between, 0.99):.1f}, mean {statistics.mean(between) * 1000:.1f} ms")
    after = server.memory()
    expect("memory is flat", after < before * 1.1 + 8, f"{before:.0f} → {after:.0f} MiB")


def draining(home):
    with Server(home, "--api-key-env", "SERVE_KEY") as server:
        pieces = server.chat(max_tokens=60, temperature=1, stream=True)
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        rest = list(pieces)
        expect("what is in progress is completed", rest[-1].choices[0].finish_reason is not None)
        expect("then it ends", server.process.wait(20) == 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--garbage", type=int, default=10_000)
    parser.add_argument("--home", help="where the quickstart's stages are kept, so that the next check need not make them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = options.home or temporary
        with Server(home, "--api-key-env", "SERVE_KEY", "--queue", "256") as server:
            answers(server)
            errors(server)
            misbehaviour(server, options.garbage)
            load(server, options.clients, options.seconds)
        structured(home)
        full_queue(home)
        draining(home)
    print("all as it should be")


if __name__ == "__main__":
    sys.exit(main())
