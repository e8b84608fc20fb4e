"""What can be half there in a process: forks, interrupts, threads at its end. Each in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np
import headwise as hw
from headwise.kernels import apart, jit, llvm, thread_count, threads
from headwise.kernels.decode import Combine
eight = frozenset(range(8))
thread_count.cpus = threads.cpus = lambda: eight
hw.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((1, 4, 300, 32)).astype(np.float32)
def call(): return hw.attention(x, x, x, mask=hw.causal())
"""


def output(script: str, seconds: int = 60, code: int = 0, **env: str) -> str:
    """What it prints; one that waits for ever, ends otherwise or complains fails."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + script],
        env=os.environ | env,
        timeout=seconds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stderr[-3000:]
    return done.stdout


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")


@forks
def test_a_child_of_a_process_that_compiles_can_compile():
    script = """
def work():
    for n in range(1, 400):
        if stop: break
        jit.function(Combine("f32", n), llvm.chosen())
right, stop = call(), []
other = threading.Thread(target=work); other.start()
for n in range(8):
    time.sleep(0.013 * n)
    child = os.fork()
    if child == 0:
        jit.function(Combine("f32", 900 + n), llvm.chosen())
        os._exit(0 if np.array_equal(call(), right) and not threads._busy.locked() else 7)
    assert os.waitpid(child, 0)[1] == 0
stop.append(1); other.join()
"""
    assert output(script, HEADWISE_CACHE="") == ""


@forks
def test_a_child_forked_in_a_thread_or_by_multiprocessing_computes():
    script = """
import multiprocessing
right = call()
def check(): sys.exit(0 if np.array_equal(call(), right) else 7)
def start():
    child = multiprocessing.get_context("fork").Process(target=check)
    child.start(); child.join(); found.append(child.exitcode)
found = []
running = [threading.Thread(target=start) for _ in range(3)]
for t in running: t.start()
for _ in range(50): call()
for t in running: t.join()
print(found)
"""
    assert output(script) == "[0, 0, 0]\n"


@alarms
def test_interrupts_leave_the_workers_free_and_the_compiler_usable():
    script = """
right, armed, hits, n = call(), False, 0, 1
def stop(*_):
    if armed: raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.0017, 0.0017)
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        armed = True
        if hits % 40 == 0:
            n += 1
            jit.function(Combine("f32", n), llvm.chosen())
        if hits % 7 == 0: threads._pool = None
        call()
        armed = False
    except KeyboardInterrupt:
        hits += 1
    armed = False
    assert not threads._busy.locked()
signal.setitimer(signal.ITIMER_REAL, 0)
assert hits > 100, hits
other = threading.Thread(target=lambda: print(jit.function(Combine("f64", n), llvm.chosen()) > 0))
other.start(); other.join()
assert np.array_equal(call(), right)
"""
    assert output(script, HEADWISE_CACHE="") == "True\n"


@alarms
def test_a_handler_of_a_signal_may_call_and_compile():
    script = """
n = 0
def also(*_):
    global n
    n += 1
    jit.function(Combine("f64", n % 50 + 1), llvm.chosen())
    seen.append(np.array_equal(call(), right))
right, seen = call(), []
signal.signal(signal.SIGALRM, also)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
for m in range(1, 60):
    threads._pool = None
    jit.function(Combine("f32", m), llvm.chosen()); call()
signal.setitimer(signal.ITIMER_REAL, 0)
print(len(seen) > 2 and all(seen))
"""
    assert output(script, HEADWISE_CACHE="") == "True\n"


@pytest.mark.parametrize("way", ["pass", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_threads_that_compute_while_the_process_ends(way):
    script = f"""
big = np.zeros((1, 8, 1500, 64), np.float32)
def work():
    n = 0
    while True:
        n += 1
        jit.function(Combine("f32", n % 200 + 1), llvm.chosen())
        hw.attention(big, big, big)
for _ in range(3): threading.Thread(target=work, daemon=True).start()
time.sleep(0.4)
import atexit
atexit.register(lambda: call())
{way}
"""
    code = {"pass": 0, "sys.exit(3)": 3}.get(way, -15)
    assert output(script, code=code, HEADWISE_CACHE="") == ""


def test_no_more_threads_to_be_had():
    script = """
right = call()
threads._pool = None
def none(self): raise RuntimeError("can't start new thread")
threading.Thread.start = none
assert np.array_equal(call(), right)
print(threads._pool.threads, jit.function(Combine("f32", 77), llvm.chosen()) > 0)
"""
    assert output(script) == "[] True\n"
