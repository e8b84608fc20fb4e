"""The process in which scripts run."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from multiprocessing.connection import Connection

HANGS = 120  # seconds


def work(pipe: Connection) -> None:
    """Runs the scripts that come, and says what was wrong with each: "" where nothing was."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # torch's own layers give it too
    while True:
        text = pipe.recv()
        try:
            exec(compile(text, "script", "exec"), {"__name__": "script"})
            pipe.send("")
        except Exception:
            pipe.send(traceback.format_exc(limit=-3))


class Worker:
    """The second process."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def run(self, text: str) -> str:
        self.pipe.send(text)
        try:
            if self.pipe.poll(HANGS):
                return str(self.pipe.recv())
            self.process.kill()
            return f"hangs for {HANGS} s"
        except (EOFError, ConnectionResetError):
            self.process.join()
            return f"crash: the process ended with {self.process.exitcode}"
