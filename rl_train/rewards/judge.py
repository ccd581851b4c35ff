"""A language model behind an OpenAI-compatible server (vLLM and the like) as judge of captions.

score   one number from 0 to 10, divided by 10
mcq     one of five verdicts: A 1, B .75, C .5, D .2, E 0
qa      questions made from the reference, answered from the hypothesis, in the manner of DLC-Bench

Prompts and the reading of replies are in `judge_text`.
"""

import hashlib
import json
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch

from rl_train.rewards.judge_text import (
    MODES,
    RIGHT,
    Question,
    messages,
    parse_attributes,
    parse_mcq,
    parse_score,
    questions,
    reply_text,
)

FAILURE_WINDOW = 200  # pairs that --max_judge_failures looks back on


class JudgeFailed(RuntimeError):
    """The judge failed on too large a share of the last captions for the run to go on."""


class ReplyCache:
    """Replies that were understood, in memory or in a sqlite3 file that several ranks may share.

    The file is opened at the first use. Errors of sqlite3 pass through.
    """

    def __init__(self, path: str | Path | None):
        self.path, self.connection, self.lock = path, None, Lock()

    def _open(self) -> sqlite3.Connection:
        if self.connection is None:
            if self.path is not None:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(
                self.path or ":memory:", timeout=60, isolation_level=None, check_same_thread=False
            )
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
        return self.connection

    def get(self, key: str) -> str | None:
        with self.lock:
            row = self._open().execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return row and row[0]

    def put(self, replies: dict[str, str]):
        """Store several replies in one transaction, which waits for other processes."""
        with self.lock:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?)", replies.items())
            connection.execute("COMMIT")


class LLMJudge:
    """Scores captions by a model behind an OpenAI-compatible server.

    Args:
        base_url: of the server's API, such as http://localhost:9100/v1.
        model: name that the server knows.
        mode: one of MODES.
        cache_path: sqlite3 file of replies, keyed by model, mode and whole prompt; None keeps them
            in memory.
        timeout: seconds that a request may take.
        num_retries: further attempts after a timeout, a lost connection, a full (429) or broken
            (5xx) server, the k-th after backoff * 2^(k-1) seconds.
        num_workers: requests at a time.
        seed: of the order of options in mode qa.

    The key of a server that wants one is read from the environment's OPENAI_API_KEY.

    Attributes:
        requests, failures: pairs with a caption that `score` got, and those of them that it could
            not score, since `take_counts`.

    Raises:
        ValueError: unknown mode, or the openai library is not installed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        mode: str = "score",
        *,
        cache_path: str | Path | None = None,
        timeout: float = 30.0,
        num_retries: int = 3,
        num_workers: int = 32,
        backoff: float = 0.5,
        seed: int = 0,
    ):
        if mode not in MODES:
            raise ValueError(f"--llm_judge_mode {mode!r} is unknown; known: {', '.join(MODES)}")
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "--use_llm_judge needs the openai library: pip install -e '.[judge]' "
                "(the extra `judge`)"
            ) from error
        self.error = openai.APIError
        self.transient = (
            openai.APIConnectionError,  # timeouts too
            openai.InternalServerError,
            openai.RateLimitError,
        )
        # The client's own retries are off: those of `_request` are the only ones.
        self.client = openai.OpenAI(
            base_url=base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=timeout,
            max_retries=0,
        )
        self.base_url, self.model, self.mode, self.seed = base_url, model, mode, seed
        self.num_retries, self.num_workers, self.backoff = num_retries, num_workers, backoff
        self.cache, self.fresh = ReplyCache(cache_path), {}
        self.requests = self.failures = 0

    def score(self, references: Sequence[str], hypotheses: Sequence[str]) -> torch.Tensor:
        """Return the judge's score of every caption pair, as (N,) float32 in [0, 1].

        It is NaN where no clear verdict was obtained. A blank hypothesis scores 0 without a
        request. Equal pairs are asked once, and never again once they are in the cache; failures
        are not cached.

        Args:
            references: N ground-truth captions.
            hypotheses: N generated captions, paired by index.

        Raises:
            TypeError: one side is a single str.
            ValueError: the two sides differ in length.
        """
        if isinstance(references, str) or isinstance(hypotheses, str):
            raise TypeError("score takes two lists of captions, not a single str")
        if len(references) != len(hypotheses):
            raise ValueError(
                f"score got {len(references)} references and {len(hypotheses)} hypotheses"
            )
        pairs = list(zip(references, hypotheses))
        asked = list(dict.fromkeys(pair for pair in pairs if pair[1].strip()))
        with ThreadPoolExecutor(self.num_workers) as pool:
            if self.mode == "qa":
                distinct = list(dict.fromkeys(reference for reference, _ in asked))
                asked_of = dict(zip(distinct, pool.map(self._questions, distinct)))
                answers = pool.map(lambda pair: self._qa(asked_of[pair[0]], pair[1]), asked)
            else:
                answers = pool.map(self._compare, asked)
            scores = dict(zip(asked, answers))
        if self.fresh:
            self.cache.put(self.fresh)
            self.fresh = {}
        values = [scores[pair] if pair in scores else 0.0 for pair in pairs]
        self.requests += sum(pair in scores for pair in pairs)
        self.failures += sum(map(math.isnan, values))
        return torch.tensor(values, dtype=torch.float32)  # (N,)

    def fault(self) -> str | None:
        """Return one sentence on why the judge cannot be used, None if it can; asks it once."""
        try:
            self._request([{"role": "user", "content": "Reply with the number 1."}], 1)
        except self.error as error:
            reason = " ".join(str(error).split())[:300]
            return (
                f"--llm_judge_base_url {self.base_url}: the judge --llm_judge_model {self.model} "
                f"cannot be asked there: {reason}"
            )
        return None

    def check(self):
        """Return None if the server answers and knows the model.

        Raises:
            ValueError: it does not; one sentence with URL, model and flags.
        """
        fault = self.fault()
        if fault:
            raise ValueError(fault)

    def take_counts(self) -> dict[str, int]:
        """Return {"failed", "asked"}, pairs since the last call, and start counting anew."""
        counts = {"failed": self.failures, "asked": self.requests}
        self.requests = self.failures = 0
        return counts

    def _compare(self, pair: tuple[str, str]) -> float:
        """Return the score of one pair in mode score or mcq."""
        parse = {"score": parse_score, "mcq": parse_mcq}[self.mode]
        reply = self._reply(
            messages(self.mode, {"reference": pair[0], "candidate": pair[1]}),
            lambda text: not math.isnan(parse(text)),
            32,
        )
        return math.nan if reply is None else parse(reply)

    def _questions(self, reference: str) -> list[Question] | None:
        """Return the questions of a reference, None if the judge did not give any."""
        reply = self._reply(
            messages("extract", {"caption": reference}),
            lambda text: parse_attributes(text) is not None,
            512,
        )
        return None if reply is None else questions(parse_attributes(reply), reference, self.seed)

    def _qa(self, asked: list[Question] | None, hypothesis: str) -> float:
        """Return the score of a hypothesis by the questions of its reference.

        A missed object or a failed answer ends it.
        """
        if asked is None:
            return math.nan
        total = 0.0
        for k, question in enumerate(asked):
            reply = self._reply(
                question.messages(hypothesis),
                lambda text: not math.isnan(question.points(text)),
                32,
            )
            if reply is None:
                return math.nan
            points = question.points(reply)
            if k == 0 and points < RIGHT:
                return 0.0
            total += points
        return max(total / len(asked), 0.0)

    def _reply(self, chat: list[dict[str, str]], understood, max_tokens: int) -> str | None:
        """Return the reply to a chat, from the cache or the server; None if none is understood."""
        key = hashlib.sha256(json.dumps([self.model, self.mode, chat]).encode()).hexdigest()
        reply = self.cache.get(key)
        if reply is not None and understood(reply):
            return reply
        try:
            reply = self._request(chat, max_tokens)
        except self.error:
            return None
        if reply is None or not understood(reply):
            return None
        self.fresh[key] = reply
        return reply

    def _request(self, chat: list[dict[str, str]], max_tokens: int) -> str | None:
        """Return the server's reply, None if its body holds none.

        Raises:
            openai.APIError: the last attempt failed too.
        """
        for attempt in range(self.num_retries + 1):
            try:
                body = self.client.chat.completions.with_raw_response.create(
                    model=self.model, messages=chat, temperature=0, max_tokens=max_tokens
                )
                return reply_text(body.text)
            except self.transient:
                if attempt == self.num_retries:
                    raise
                time.sleep(self.backoff * 2**attempt)


class FailureWindow:
    """Failures among the last pairs asked: the steps that hold the last `size` of them.

    Until `size` pairs have been asked, those that are missing count as scored, so that a run does
    not stop for its first hiccup.
    """

    def __init__(self, limit: float, size: int = FAILURE_WINDOW):
        self.limit, self.size, self.steps = limit, size, deque()

    def state_dict(self) -> dict:
        return dict(steps=list(self.steps))

    def load_state_dict(self, state: dict):
        self.steps = deque(state["steps"])

    def add(self, failed: float, asked: float):
        """Return None after counting one step.

        Raises:
            JudgeFailed: more than `limit` of the window failed.
        """
        self.steps.append((failed, asked))
        while sum(asked for _, asked in self.steps) - self.steps[0][1] >= self.size:
            self.steps.popleft()
        failed, asked = (int(sum(counts)) for counts in zip(*self.steps))
        if failed > self.limit * max(asked, self.size):
            raise JudgeFailed(
                f"the LLM judge failed on {failed} of the last {asked} captions, more than "
                f"--max_judge_failures {self.limit:g} of a window of {self.size} allows"
            )
