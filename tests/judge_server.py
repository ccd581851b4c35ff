"""An OpenAI-compatible server for tests: /v1/models and /v1/chat/completions.

    python tests/judge_server.py --port 9100 [--model NAME] [--delay SECONDS]  # until it is killed

Replies follow from the request alone. In tests: `with JudgeServer(behaviour) as server:`, where
behaviour(chat, n) of the n-th chat (from 0) returns the reply as str, or (status, body) for an
answer that is none; it may sleep. `server.chats` holds what was asked.
"""

import argparse
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "meta-llama/Meta-Llama-3.1-8B-Instruct"
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def fields(chat: list[dict]) -> dict:
    """The JSON object between the <data> marks of the user's message, which has them once."""
    (block,) = re.findall(r"<data>\n(.*)\n</data>", chat[-1]["content"], re.S)
    assert chat[-1]["content"].count("<data>") == chat[-1]["content"].count("</data>") == 1
    return json.loads(block)


def unquoted(chat: list[dict]) -> str:
    """What the user's message says outside of JSON strings."""
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
                self.answer(*reply)

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
