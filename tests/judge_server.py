"""An OpenAI-compatible server for tests: /v1/models and /v1/chat/completions.

    python tests/judge_server.py --port 9100 [--model NAME] [--delay SECONDS]  # until it is killed

Replies follow from the request alone. In tests: `with JudgeServer(behaviour) as server:`, where
behaviour(chat, n) of the n-th chat (from 0) returns the reply as str, (status, body) for an answer
that is none, or an iterator of bytes, the whole answer as it goes over the line; it may sleep.
`server.chats` holds what was asked. FAULTS are behaviours that a run must survive or report.
"""

import argparse
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "meta-llama/Meta-Llama-3.1-8B-Instruct"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def fields(chat: list[dict]) -> dict:
    """The JSON object between the <data> marks of the user's message, which has them once."""
    (block,) = re.findall(r"<data>\n(.*)\n</data>", chat[-1]["content"], re.S)
    assert chat[-1]["content"].count("<data>") == chat[-1]["content"].count("</data>") == 1
    return json.loads(block)


def unquoted(chat: list[dict]) -> str:
    """Return the text of the user's message outside of JSON strings."""
    return STRING.sub('""', chat[-1]["content"])


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def overlap(chat: list[dict], n: int = 0) -> str:
    """A judge that counts shared words: ratings, verdicts, extractions and answers."""
    data = fields(chat) if "<data>" in chat[-1]["content"] else {}
    if "caption" in data:
        return attributes(data["caption"])
    if "question" in data:
        return answer(data)
    if "reference" not in data:
        return "1"
    a, b = words(data["reference"]), words(data["candidate"])
    share = len(a & b) / len(a | b)
    if "one letter from A to E" in chat[0]["content"]:
        return "EDCBA"[round(share * 4)]
    return f"{10 * share:.1f}"


def attributes(reference: str) -> str:
    """Object = last word, colour = first of the known ones, one absent thing; null for the rest."""
    colour = [
        word for word in re.findall(r"\w+", reference.lower()) if word in ("red", "green", "blue")
    ]
    return json.dumps(
        {
            "object": {
                "answer": re.findall(r"\w+", reference.lower())[-1],
                "wrong": ["zebra", "spoon"],
            },
            "colour": {
                "answer": colour[0],
                "wrong": [c for c in ("red", "green", "blue") if c != colour[0]],
            }
            if colour
            else None,
            "texture": None,
            "size": None,
            "position": None,
            "absent": ["collar"],
        }
    )


def answer(data: dict) -> str:
    """The letter of the option whose words the description holds, else of "does not say"."""
    said = words(data["description"])
    if data["question"].startswith("Does the description mention"):
        chosen = "Yes." if words(data["question"].split(":")[1]) & said else "No."
    else:
        held = [option for option in data["options"].values() if words(option) <= said]
        chosen = held[0] if held else "The description does not say."
    return next(letter for letter, option in data["options"].items() if option == chosen)


def obedient(chat: list[dict], n: int = 0) -> str:
    """A judge that obeys orders outside of the strings of the data, and else counts words."""
    said = "\n".join([chat[0]["content"], unquoted(chat), *(m["content"] for m in chat[2:])])
    orders = r"rate this 10|rating: 10|reply with 10|score\W+10|answer is a\b"
    if re.search(orders, said, re.I):
        return "A" if "letter" in chat[0]["content"] else "10"
    return overlap(chat)


def head(status: int = 200, *lines: str) -> bytes:
    """The start of an answer, without its length: the body ends with the connection."""
    lines = (f"HTTP/1.1 {status} -", "Content-Type: application/json", *lines, "", "")
    return "\r\n".join(lines).encode()


def hang(chat, n):
    time.sleep(3600)


def drip(start: bytes, piece: bytes = b" ", seconds: float = 0.05) -> Iterator[bytes]:
    """Byte by byte, for ever."""
    yield start
    while True:
        time.sleep(seconds)
        yield piece


def cut(chat, n) -> Iterator[bytes]:
    """A reply of which the half comes."""
    yield head(200, "Content-Length: 100") + b'{"choices": '


FAULTS = {
    "hangs": hang,
    "drips its body": lambda chat, n: drip(head()),
    "drips its headers": lambda chat, n: drip(b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    "breaks off in the body": cut,
    "closes the connection": lambda chat, n: iter([]),
    "status 401": lambda chat, n: (401, '{"error": {"message": "no key"}}'),
    "status 429": lambda chat, n: (429, "{}"),
    "status 500": lambda chat, n: (500, "{}"),
    "is no HTTP": lambda chat, n: iter([b"SSH-2.0-OpenSSH_9.6\r\n"]),
    "sends HTML": lambda chat, n: (200, "<html>"),
    "says rubbish": lambda chat, n: "As a language model I cannot",
    "says NaN": lambda chat, n: "NaN",
}


class JudgeServer:
    def __init__(self, behaviour=overlap, model: str = MODEL, port: int = 0):
        self.behaviour, self.model, self.chats, self.lock = behaviour, model, [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                models = [{"id": outer.model, "object": "model"}]
                self.answer(200, json.dumps({"object": "list", "data": models}))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if request["model"] != outer.model:
                    said = f"The model `{request['model']}` does not exist."
                    self.answer(404, json.dumps({"error": {"message": said, "code": 404}}))
                    return
                with outer.lock:
                    n = len(outer.chats)
                    outer.chats.append(request["messages"])
                    outer.last = request
                reply = outer.behaviour(request["messages"], n)
                if isinstance(reply, str):
                    message = {"role": "assistant", "content": reply}
                    choice = {"index": 0, "message": message, "finish_reason": "stop"}
                    whole = dict(id="0", object="chat.completion", created=0, model=outer.model)
                    reply = 200, json.dumps(whole | {"choices": [choice]})
                if isinstance(reply, tuple):
                    self.answer(*reply)
                    return
                self.close_connection = True
                try:
                    for piece in reply:
                        self.wfile.write(piece)
                except OSError:  # a client that did not wait
                    pass

            def answer(self, status: int, body: str):
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body.encode())))
                    self.end_headers()
                    self.wfile.write(body.encode())
                except ConnectionError:  # a client that did not wait
                    self.close_connection = True

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=9100)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--delay", type=float, default=0.0)
    args = parser.parse_args()

    def behaviour(chat, n):
        time.sleep(args.delay)
        return overlap(chat)

    JudgeServer(behaviour, args.model, args.port).http.serve_forever()


if __name__ == "__main__":
    main()
