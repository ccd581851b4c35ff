"""LLM judge of captions, behind an OpenAI-compatible server (vLLM and the like).

score   one number from 0 to 10, divided by 10
mcq     one of five verdicts: A 1, B .75, C .5, D .2, E 0
qa      questions made from the reference, answered from the hypothesis, in the manner of DLC-Bench

Prompts and parsers of replies are in `judge_text`; connections, timeouts and retries are those of
the openai library.
"""

import asyncio
import json
import math
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import torch

from rl_train.rewards.judge_text import ANSWER, MODES, RIGHT, messages, questions
from rl_train.rewards.meteor import check_lists
from rl_train.utils.io import UserFault

# A run stops if the judge fails on more than this fraction of the last FAILURE_WINDOW captions:
# a broken server ends it within a few steps, a hiccup does not.
MAX_FAILED_FRACTION, FAILURE_WINDOW = 0.2, 200
CHOICE_TOKENS, EXTRACT_TOKENS = 32, 512  # of a number or letter; of the JSON of mode qa
Chat = list[dict[str, str]]
Ask = Callable[..., Awaitable]  # see `LLMJudge.connect`


class JudgeFailed(UserFault):
    """Error that ends a run: the judge failed on too many of the last captions."""


class NoReply(RuntimeError):
    """Error of a request without a usable reply; the message gives the reason."""


class LLMJudge:
    """Scores captions by a model behind an OpenAI-compatible server.

    Args:
        base_url: of the server's API, such as http://localhost:9100/v1.
        model: name that the server knows.
        mode: one of MODES.
        timeout: seconds that the server may be silent in an attempt.
        max_seconds: that a call of `score` may take; the pairs that are left then are failures.
        max_retries: further attempts after a timeout, a lost connection, a full (429) or broken
            (5xx) server.
        max_connections: requests at a time.
        seed: of the order of options in mode qa.

    The key of a server that wants one is read from the environment's OPENAI_API_KEY.

    Raises:
        ValueError: unknown mode, or the openai library is not installed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        mode: str = "score",
        *,
        timeout: float = 30.0,
        max_seconds: float = 120.0,
        max_retries: int = 3,
        max_connections: int = 32,
        seed: int = 0,
    ):
        if mode not in MODES:
            raise ValueError(f"--llm_judge_mode {mode!r} is unknown; known: {', '.join(MODES)}")
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "the LLM judge (--use_llm_judge, a weight of --reward_weights, "
                "tools.experiments.dlc_bench) needs the openai library: pip install -e '.[judge]' "
                "(the extra `judge`)"
            ) from error
        self.error = openai.OpenAIError
        self.client = partial(
            openai.AsyncOpenAI,
            base_url=base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=timeout,
            max_retries=max_retries,
        )
        self.base_url, self.model, self.mode, self.seed = base_url, model, mode, seed
        self.max_seconds, self.max_connections = max_seconds, max_connections
        self.num_scored, self.failures = 0, Counter()

    def score(self, references: Sequence[str], hypotheses: Sequence[str]) -> torch.Tensor:
        """Return the judge's score of every caption pair, as (N,) float32 in [0, 1].

        It is NaN where no clear verdict was obtained in time. A blank hypothesis scores 0 without a
        request. Equal pairs are sent once.

        Args:
            references: N ground-truth captions.
            hypotheses: N generated captions, paired by index.

        Raises:
            TypeError: one side is a single str.
            ValueError: the two sides differ in length.
        """
        check_lists("score", references, hypotheses)
        pairs = list(zip(references, hypotheses, strict=True))
        scores = asyncio.run(self._scores(pairs))
        return torch.tensor(scores, dtype=torch.float32)  # (N,)

    def fault(self) -> str | None:
        """Return a sentence on why the judge cannot score a pair, None if it can."""
        self.score(["a red dog"], ["a red dog"])
        _, failures = self.take_failures()
        if not failures:
            return None
        return (
            f"--llm_judge_base_url {self.base_url}: the judge --llm_judge_model {self.model} "
            f"cannot be asked there: {', '.join(failures)}"
        )

    def take_failures(self) -> tuple[int, Counter]:
        """Return (pairs sent, {why pairs failed: times}) since the last call, and start anew."""
        counts = self.num_scored, self.failures
        self.num_scored, self.failures = 0, Counter()
        return counts

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Ask]:
        """Yield `ask(chat, parse, max_tokens)`, which returns parse(the text of the reply).

        Equal chats are sent once. `ask` raises NoReply without a reply, or if `parse` returns None.
        """
        slots, replies = asyncio.Semaphore(self.max_connections), {}

        async def request(chat: Chat, max_tokens: int) -> str:
            try:
                async with slots:
                    reply = await client.chat.completions.with_raw_response.create(
                        model=self.model, messages=chat, temperature=0, max_tokens=max_tokens
                    )
                return str(json.loads(reply.text)["choices"][0]["message"]["content"] or "")
            except self.error as error:
                raise NoReply(" ".join(str(error).split())[:300]) from error
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise NoReply("its replies are no chat completions") from error

        async def ask(
            chat: Chat, parse: Callable[[str], float | dict | str | None], max_tokens: int
        ) -> float | dict | str:
            key = json.dumps(chat)
            if key not in replies:
                # A task, so that all who wait for an equal chat await one reply.
                replies[key] = asyncio.create_task(request(chat, max_tokens))
            value = parse(await replies[key])
            if value is None:
                raise NoReply("its replies are not what was asked for")
            return value

        # Nothing outlives the connection: processes may fork between two.
        async with self.client() as client:
            yield ask

    async def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        # One deadline for all pairs: equal ones share a request, which ends with the first of them.
        deadline = asyncio.get_running_loop().time() + self.max_seconds
        async with self.connect() as ask:
            scores = (self._score_or_nan(ask, deadline, *pair) for pair in pairs)
            return await asyncio.gather(*scores)

    async def _score_or_nan(
        self, ask: Ask, deadline: float, reference: str, hypothesis: str
    ) -> float:
        """Return the score of a pair; NaN, with a reason counted, if there is none in time."""
        if not hypothesis.strip():
            return 0.0
        self.num_scored += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await self._score(ask, reference, hypothesis)
        except (NoReply, TimeoutError) as error:
            self.failures[str(error) or f"a step waits {self.max_seconds:g} s at most"] += 1
            return math.nan

    async def _score(self, ask: Ask, reference: str, hypothesis: str) -> float:
        """Return the score of a pair. Raises NoReply.

        In mode qa a missed object scores 0, and no further question is sent.
        """
        instructions, parse = MODES[self.mode]
        if self.mode != "qa":
            chat = messages(instructions, {"reference": reference, "candidate": hypothesis})
            return await ask(chat, parse, CHOICE_TOKENS)
        attributes = await ask(
            messages(instructions, {"caption": reference}), parse, EXTRACT_TOKENS
        )
        total, all_questions = 0.0, questions(attributes, reference, self.seed)
        for k, question in enumerate(all_questions):
            chat = messages(ANSWER, {"description": hypothesis, **question.fields})
            points = await ask(chat, question.parse, CHOICE_TOKENS)
            if k == 0 and points < RIGHT:
                return 0.0
            total += points
        return max(total / len(all_questions), 0.0)


def failure_sentence(failed: float, num_scored: float, failures: Counter) -> str:
    """Return the message about captions that were not judged, with the commonest reasons."""
    reasons = "; ".join(reason for reason, _ in failures.most_common(2))
    return f"the LLM judge failed on {failed:.0f} of {num_scored:.0f} captions: {reasons}"


class FailureWindow:
    """Failures among the last pairs: the steps that hold the last `size` of them.

    Until there are `size` pairs, missing ones count as scored, so that a run does not stop for its
    first hiccup.
    """

    def __init__(self, limit: float = MAX_FAILED_FRACTION, size: int = FAILURE_WINDOW):
        self.limit, self.size, self.steps = limit, size, deque()

    def state_dict(self) -> dict[str, list[tuple[float, float]]]:
        """Return the window, which a resumed run goes on with."""
        return dict(steps=list(self.steps))

    def load_state_dict(self, state: dict[str, list[tuple[float, float]]]):
        self.steps = deque(state["steps"])

    def add(self, failed: float, num_scored: float):
        """Count one step.

        Raises:
            JudgeFailed: more than `limit` of the window failed.
        """
        self.steps.append((failed, num_scored))
        # Steps leave as long as the rest still holds `size` pairs.
        while sum(n for _, n in self.steps) - self.steps[0][1] >= self.size:
            self.steps.popleft()
        failed, num_scored = (int(sum(counts)) for counts in zip(*self.steps))
        if failed > self.limit * max(num_scored, self.size):
            raise JudgeFailed(
                f"the LLM judge failed on {failed} of the last {num_scored} captions, more than "
                f"{self.limit:g} of a window of {self.size}: mend the server of "
                "--llm_judge_base_url, then continue with --resume"
            )
