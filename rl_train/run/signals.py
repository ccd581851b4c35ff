"""Signals that ask a run to stop: it ends its step, writes a checkpoint and exits with status 75.

A cluster sends SIGTERM, SIGUSR1 or SIGUSR2 before it takes a machine, and SIGXCPU when its time is
used up. A terminal sends SIGINT (Ctrl-C), and SIGHUP when it is closed. A signal may reach one rank
only; ranks tell each other in what they gather anyway, at the end of a step.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run me again with --resume
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGHUP,
)


class Interrupted(BaseException):
    """Raised when a signal ends the run; like KeyboardInterrupt, no library catches it."""


class SignalHandler:
    """Record of the signals that this process and other ranks have received.

    Attributes:
        received: name of the first signal that this process received, or None.
        agreed: name of a signal that all ranks know of, or None.
        immediate: True until the first step: nothing can be saved, so a signal raises Interrupted
            at once.
    """

    def __init__(self, is_main: bool = True):
        self.received: str | None = None
        self.agreed: str | None = None
        self.immediate, self.is_main = True, is_main

    @contextmanager
    def listening(self) -> Iterator["SignalHandler"]:
        """Record signals instead of ending the process, while the context is open.

        SIGHUP stays ignored if it was so at the start, as `nohup` has it.
        """
        handlers = {
            number: signal.signal(number, self._receive)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def agree(self, received_by_ranks: list[str | None]) -> bool:
        """Return whether any rank has received a signal, from the gathered `received` of all ranks.

        A signal that came after the gathering counts at the next call.
        """
        self.agreed = self.agreed or next(filter(None, received_by_ranks), None)
        return self.agreed is not None

    def _receive(self, number: int, _):
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            mute_closed_terminal()
        if self.immediate:
            raise Interrupted(f"{name} before the first step")
        if self.received:
            return
        self.received = name
        message = f"\n{name}: leaving with a checkpoint after this step"
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun hands one Ctrl-C on a second time
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            message += "; a second Ctrl-C ends at once"
        if self.is_main:
            os.write(2, f"{message}\n".encode())  # past stdout's buffer, which may be busy


def mute_closed_terminal():
    """Send stdout and stderr to nowhere if their terminal is closed.

    A progress bar would otherwise end the run by an error before its checkpoint is written.
    """
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"\n")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def ignore_signals_in_worker(_: int):
    """Ignore signals in a DataLoader's worker: a terminal or a cluster sends them to all processes.

    SIGTERM from the trainer itself still ends the worker: if the trainer exits with its loader in
    use, Python sends it and waits without limit.
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
