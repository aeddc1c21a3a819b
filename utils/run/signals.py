"""SIGINT and SIGTERM: the first asks the run to save and stop, a second Ctrl-C stops it at once."""

import os
import signal
import threading
import time

from utils import mpi


class Stopped(KeyboardInterrupt):
    """Raised after SIGINT or SIGTERM, when the checkpoint is written. `status` is for exit."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}; the run is saved")
        self.status = 128 + number


class Signals:
    """`number` is that of the signal that has come, 0 before."""

    def __init__(self):
        self.number, self.time, self.pid = 0, 0.0, os.getpid()

    def listen(self, stack) -> None:
        """Handle both signals until `stack`, an ExitStack, closes; only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in signal.SIGINT, signal.SIGTERM:
                before = signal.signal(number, self.on_signal)
                stack.callback(signal.signal, number, before or signal.SIG_DFL)

    def on_signal(self, number, frame):
        if os.getpid() != self.pid:  # a process of an environment, forked from this one
            if number == signal.SIGTERM:  # a Ctrl-C is for the run, which still needs this process
                os._exit(128 + number)
            return
        now = time.monotonic()
        # A terminal and mpiexec may both deliver the same Ctrl-C.
        if self.number and number == signal.SIGINT and now > self.time + 0.3:
            raise KeyboardInterrupt
        if mpi.rank() == 0 and not self.number:
            when = b"the next report" if mpi.size() > 1 else b"the end of this step or rollout"
            os.write(2, b"\nsaving and stopping at " + when + b"; Ctrl-C again stops at once\n")
        self.number, self.time = self.number or number, now
