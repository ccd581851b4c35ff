"""Signals that ask a run to stop: it ends its step, writes a checkpoint and leaves with STATUS.

A cluster sends SIGTERM or SIGUSR1 before it takes a machine, a terminal SIGINT (Ctrl-C). A signal
may reach one rank only; ranks tell each other in what they gather anyway, at the end of a step.
"""

import os
import signal
import threading
import time
from contextlib import contextmanager

STATUS = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run me again with --resume
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One Ctrl-C comes twice under torchrun, from the terminal and from torchrun. Seconds after which
# it is a second one.
ONE_PRESS = 1.0


class Stopped(BaseException):
    """A signal has ended the run; of no kind that a library would catch, as KeyboardInterrupt."""


class Stops:
    """What signals have asked of this process and, as far as it knows, of all ranks.

    Attributes:
        asked: name of the first signal that this process got, or None.
        agreed: name of one that all ranks know of, or None.
        at_once: whether a signal raises Stopped where it finds the process, as it does before
            there is anything to save.
    """

    def __init__(self, is_main: bool = True):
        self.asked: str | None = None
        self.agreed: str | None = None
        self.at_once, self.is_main, self.since = True, is_main, 0.0

    @contextmanager
    def listening(self):
        """A context in which signals are noted instead of ending the process."""
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self, asked_of_ranks: list[str | None]) -> bool:
        """Whether any rank was asked to stop, from the `asked` of all, which are the same on all.

        Only what was gathered counts: a signal that has come since is of the next time.
        """
        self.agreed = self.agreed or next(filter(None, asked_of_ranks), None)
        return self.agreed is not None

    def _note(self, number, _):
        name, now = signal.Signals(number).name, time.monotonic()
        if self.asked and number == signal.SIGINT and now - self.since > ONE_PRESS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.asked:
            self.asked, self.since = name, now
            if self.is_main and not self.at_once:  # written past stdout's buffer, which may be busy
                what = "leaving with a checkpoint after this step; a second Ctrl-C ends at once"
                os.write(2, f"\n{name}: {what}\n".encode())
        if self.at_once:
            raise Stopped(f"{name} before the first step")


def leave_to_the_trainer(_):
    """Ignore the signals, in a DataLoader's worker: a terminal or a cluster sends them to all.

    The trainer's own SIGTERM ends it: so Python ends the workers that are left when the trainer
    exits with its loader in use, and waits for them without limit.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one ignored cannot be waited for
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_trainer, args=(os.getppid(),), daemon=True).start()


def _end_with_the_trainer(trainer: int):
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != trainer:
        pass
    os._exit(0)
