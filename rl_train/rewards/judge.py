"""A language model behind an OpenAI-compatible server (vLLM and the like) as judge of captions.

score   one number from 0 to 10, divided by 10
mcq     one of five verdicts: A 1, B .75, C .5, D .2, E 0
qa      questions made from the reference, answered from the hypothesis, in the manner of DLC-Bench

Prompts and the reading of replies are in `judge_text`, requests in `judge_client`.
"""

import asyncio
import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import torch

from rl_train.rewards.judge_cache import ReplyCache
from rl_train.rewards.judge_client import Connection, JudgeClient, NoReply
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


class LLMJudge:
    """Scores captions by a model behind an OpenAI-compatible server.

    Args:
        base_url: of the server's API, such as http://localhost:9100/v1.
        model: name that the server knows.
        mode: one of MODES.
        cache_path: sqlite3 file of replies, keyed by model, mode and whole prompt; None keeps them
            in memory.
        timeout: seconds that a request may take, to the last byte of its reply.
        max_seconds: that a call of `score` may take; the pairs that are left then are failures.
        num_retries: further attempts after a timeout, a lost connection, a full (429) or broken
            (5xx) server, the k-th after backoff * 2^(k-1) seconds.
        num_workers: requests at a time.
        seed: of the order of options in mode qa.

    The key of a server that wants one is read from the environment's OPENAI_API_KEY.

    After a call in which no request was answered the next one makes one attempt each and takes
    `timeout` seconds at most, so that a judge that is gone costs a run minutes until it stops.

    Attributes:
        requests, failures: pairs with a caption that `score` got, and those of them that it could
            not score, since `take_counts`.
        reasons: why requests failed, {sentence: times}, since `take_reasons`.

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
        max_seconds: float = 120.0,
        num_retries: int = 3,
        num_workers: int = 32,
        backoff: float = 0.5,
        seed: int = 0,
    ):
        if mode not in MODES:
            raise ValueError(f"--llm_judge_mode {mode!r} is unknown; known: {', '.join(MODES)}")
        self.client = JudgeClient(base_url, model, timeout, num_workers, backoff)
        self.mode, self.seed = mode, seed
        self.max_seconds, self.num_retries = max_seconds, num_retries
        self.cache, self.fresh = ReplyCache(cache_path), {}
        self.requests = self.failures = 0
        self.reasons, self.silent = Counter(), False

    def score(self, references: Sequence[str], hypotheses: Sequence[str]) -> torch.Tensor:
        """Return the judge's score of every caption pair, as (N,) float32 in [0, 1].

        It is NaN where no clear verdict was obtained in time. A blank hypothesis scores 0 without a
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
        scores = asyncio.run(self._score(asked)) if asked else {}
        if self.fresh:
            self.cache.put(self.fresh)
            self.fresh = {}
        values = [scores[pair] if pair in scores else 0.0 for pair in pairs]
        self.requests += sum(pair in scores for pair in pairs)
        self.failures += sum(map(math.isnan, values))
        return torch.tensor(values, dtype=torch.float32)  # (N,)

    def fault(self) -> str | None:
        """Return one sentence on why the judge cannot be used, None if it can.

        It is asked once, with retries, for `timeout` seconds in all.
        """
        try:
            asyncio.run(self._probe())
        except NoReply as error:
            return (
                f"--llm_judge_base_url {self.client.base_url}: the judge --llm_judge_model "
                f"{self.client.model} cannot be asked there: {error}"
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

    def take_reasons(self) -> Counter:
        """Return {why requests failed: times} since the last call, and start counting anew."""
        reasons, self.reasons = self.reasons, Counter()
        return reasons

    async def _probe(self):
        """Ask for a number. Raises NoReply."""
        async with self.client.connect(self.num_retries + 1) as ask:
            try:
                async with asyncio.timeout(self.client.timeout):
                    await ask([{"role": "user", "content": "Reply with the number 1."}], 1)
            except TimeoutError as error:
                raise NoReply(f"no whole reply within {self.client.timeout:g} s") from error

    async def _score(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Return {pair: score} of different pairs; NaN where it was not obtained in time."""
        seconds = self.client.timeout if self.silent else self.max_seconds
        async with self.client.connect(1 if self.silent else self.num_retries + 1) as ask:
            start, asked_of = asyncio.create_task, {}
            if self.mode == "qa":
                distinct = dict.fromkeys(reference for reference, _ in pairs)
                asked_of = {text: start(self._questions(ask, text)) for text in distinct}
                tasks = {pair: start(self._qa(ask, asked_of[pair[0]], pair[1])) for pair in pairs}
            else:
                tasks = {pair: start(self._compare(ask, pair)) for pair in pairs}
            everything = {*asked_of.values(), *tasks.values()}
            _, late = await asyncio.wait(everything, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
                self.reasons[f"a step waits {seconds:g} s at most"] += len(late & {*tasks.values()})
            if ask.replies or ask.lost or late:
                self.silent = not ask.replies
        return {
            pair: math.nan if task.cancelled() else task.result() for pair, task in tasks.items()
        }

    async def _compare(self, ask: Connection, pair: tuple[str, str]) -> float:
        """Return the score of one pair in mode score or mcq."""
        parse = {"score": parse_score, "mcq": parse_mcq}[self.mode]
        reply = await self._reply(
            ask,
            messages(self.mode, {"reference": pair[0], "candidate": pair[1]}),
            lambda text: not math.isnan(parse(text)),
            32,
        )
        return math.nan if reply is None else parse(reply)

    async def _questions(self, ask: Connection, reference: str) -> list[Question] | None:
        """Return the questions of a reference, None if the judge did not give any."""
        reply = await self._reply(
            ask,
            messages("extract", {"caption": reference}),
            lambda text: parse_attributes(text) is not None,
            512,
        )
        return None if reply is None else questions(parse_attributes(reply), reference, self.seed)

    async def _qa(self, ask: Connection, questions_of: asyncio.Task, hypothesis: str) -> float:
        """Return the score of a hypothesis by the questions of its reference, which a task makes.

        A missed object or a failed answer ends it.
        """
        asked = await questions_of
        if asked is None:
            return math.nan
        total = 0.0
        for k, question in enumerate(asked):
            reply = await self._reply(
                ask,
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

    async def _reply(self, ask: Connection, chat, understood, max_tokens: int) -> str | None:
        """Return the reply to a chat, from the cache or the server; None if none is understood."""
        whole = [self.client.model, self.mode, chat]
        key = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
        reply = self.cache.get(key)
        if reply is not None and understood(reply):
            return reply
        try:
            body = await ask(chat, max_tokens)
        except NoReply as error:
            self.reasons[str(error)] += 1
            return None
        reply = reply_text(body)
        if reply is None or not understood(reply):
            self.reasons["its replies are not what was asked for"] += 1
            return None
        self.fresh[key] = reply
        return reply


def failure_sentence(failed: float, asked: float, reasons: Counter) -> str:
    """Return what a person is told of captions that were not judged, with the commonest reasons."""
    why = "; ".join(reason for reason, _ in reasons.most_common(2))
    return f"the LLM judge failed on {failed:.0f} of {asked:.0f} captions: {why}"


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
