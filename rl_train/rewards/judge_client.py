"""Requests to an OpenAI-compatible server that end in time, whatever the server does."""

import asyncio
import os

MAX_REPLY = 2**20  # bytes of a reply's body that are read; one of 512 tokens has some thousands
MAX_REFUSAL = 2**16  # bytes of the body of an error that are read, for its message


class NoReply(RuntimeError):
    """The server gave no reply; the sentence says why."""


class JudgeClient:
    """What is asked of one model: a connection for a while, `async with client.connect() as ask`.

    Nothing outlives the connection, so that processes may fork between two.

    Args:
        base_url: of the server's API; model: name that the server knows.
        timeout: seconds that an attempt may take from connecting to the last byte of the body,
            however the bytes come. A name server that hangs may add its own limit at the end.
        num_workers: requests at a time.
        backoff: seconds before the second attempt, twice as many before each further one.

    The key of a server that wants one is read from the environment's OPENAI_API_KEY.

    Raises:
        ValueError: the openai library is not installed.
    """

    def __init__(self, base_url: str, model: str, timeout: float, num_workers: int, backoff: float):
        try:
            import openai
        except ImportError as error:
            raise ValueError(
                "the judge of --use_llm_judge and tools.dlc_bench needs the openai library: "
                "pip install -e '.[judge]' (the extra `judge`)"
            ) from error
        self.openai = openai
        self.transient = (
            openai.APIConnectionError,  # timeouts too
            openai.InternalServerError,
            openai.RateLimitError,
        )
        self.base_url, self.model, self.timeout = base_url, model, timeout
        self.num_workers, self.backoff = num_workers, backoff

    def connect(self, num_attempts: int) -> "Connection":
        """Return a connection that makes up to `num_attempts` of each request."""
        return Connection(self, num_attempts)


class Connection:
    """Connections of one event loop to the server of a `JudgeClient`.

    Attributes:
        replies: how many requests were answered; lost: and how many were not.
    """

    def __init__(self, client: JudgeClient, num_attempts: int):
        self.client, self.num_attempts = client, num_attempts
        self.slots = asyncio.Semaphore(client.num_workers)
        self.replies = self.lost = 0

    async def __aenter__(self) -> "Connection":
        library, hooks = self.client.openai, {"response": [self._leave_long_refusals]}
        # The client's own retries are off, those of `__call__` are the only ones; a compressed
        # body could grow beyond its limit in one piece.
        self.api = library.AsyncOpenAI(
            base_url=self.client.base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=self.client.timeout,
            max_retries=0,
            default_headers={"Accept-Encoding": "identity"},
            http_client=library.DefaultAsyncHttpxClient(event_hooks=hooks),
        )
        return self

    async def __aexit__(self, *_):
        await self.api.close()

    async def _leave_long_refusals(self, response):
        """Close, unread, what the client would read to its end though it is no reply.

        That is the body of an error or of a redirection.
        """
        length = response.headers.get("Content-Length", "")
        if response.is_success or length.isdecimal() and int(length) <= MAX_REFUSAL:
            return
        await response.aclose()
        if response.is_redirect:
            reason = f"redirected, with a body of more than {MAX_REFUSAL} bytes or of unknown size"
            raise self.client.openai.APIConnectionError(message=reason, request=response.request)

    async def __call__(self, chat: list[dict[str, str]], max_tokens: int) -> str:
        """Return the body of the server's reply to a chat.

        A timeout, a lost connection, a full (429) or broken (5xx) server is asked again.

        Raises:
            NoReply: the last attempt failed too.
        """
        async with self.slots:
            for attempt in range(self.num_attempts):
                if attempt:
                    await asyncio.sleep(self.client.backoff * 2 ** (attempt - 1))
                body, reason, again = await self._attempt(chat, max_tokens)
                if body is not None:
                    self.replies += 1
                    return body
                if not again:
                    break
            self.lost += 1
            raise NoReply(reason)

    async def _attempt(self, chat, max_tokens) -> tuple[str | None, str, bool]:
        """Return the body, or None, why there is none, and whether another attempt may help."""
        create = self.api.chat.completions.with_streaming_response.create
        how = dict(model=self.client.model, temperature=0, max_tokens=max_tokens)
        try:
            async with asyncio.timeout(self.client.timeout):
                async with create(messages=chat, **how) as response:
                    body = await self._read(response)
        except TimeoutError:
            return None, f"no whole reply within {self.client.timeout:g} s", True
        except self.client.openai.APIError as error:
            reason = " ".join(str(error).split())[:300]
            return None, reason, isinstance(error, self.client.transient)
        if body is None:
            return None, "the connection was lost in the middle of a reply", True
        if len(body) > MAX_REPLY:
            return None, f"a reply of more than {MAX_REPLY} bytes", False
        return body.decode(errors="replace"), "", False

    async def _read(self, response) -> bytes | None:
        """Return the body, cut off soon after MAX_REPLY bytes; None if the connection is lost."""
        body = bytearray()
        try:
            async for piece in response.iter_bytes():
                body += piece
                if len(body) > MAX_REPLY:
                    break
        except Exception:  # of the library under openai, by its version httpx's or httpx2's own
            return None
        return bytes(body)
