import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import headwise as hw
from headwise.backends import compiled
from headwise.kernels import thread_count, threads
from headwise.options import Options
from headwise.shapes import Sizes


def attention(seed, L=257, S=257, H=4, D=32):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, H, n, D)).astype(np.float32) for n in (L, S, S))
    return compiled.attention(q, k, v, Options(scale=0.2, mask=hw.causal()), Sizes(1, H, H, L, S, D, D))[0]


@pytest.fixture(autouse=True)
def follow():
    yield
    hw.set_num_threads(None)


@pytest.mark.parametrize(("L", "S"), [(257, 257), (1, 8192), (3, 8192)])
def test_the_same_bits_on_any_number_of_threads(L, S, monkeypatch):
    eight = frozenset(range(8))  # more than there may be
    for module in (thread_count, threads):
        monkeypatch.setattr(module, "cpus", lambda: eight)
    found = []
    for n in (1, 2, 3, 5):
        hw.set_num_threads(n)
        found += [attention(1, L, S) for _ in range(3)]
    assert all(np.array_equal(x, found[0]) for x in found)


def test_eight_python_threads_at_once():
    expected = [attention(seed) for seed in range(8)]
    wrong = []

    def work(seed):
        wrong.extend(seed for _ in range(20) if not np.array_equal(attention(seed), expected[seed]))

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for x in running:
        x.start()
    for x in running:
        x.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_the_same():
    script = """
import os, sys, threading
sys.path.insert(0, TESTS)
from test_threads import attention
import numpy as np
expected = attention(1)
stop = False
def work():
    while not stop: attention(2)
other = threading.Thread(target=work); other.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(0 if all(np.array_equal(attention(1), expected) for _ in range(5)) else 7)
    assert os.waitpid(child, 0)[1] == 0
stop = True; other.join()
assert np.array_equal(attention(1), expected)
"""
    script = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + script
    here = repr(os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", script.replace("TESTS", here)], timeout=120, check=False)
    assert done.returncode == 0


def test_the_interpreter_ends_cleanly():
    script = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    script += "from test_threads import attention; attention(1, 900, 900)"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_ends_a_long_call():
    script = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_threads import attention
attention(1); print("ready", flush=True)
attention(1, 200_000, 200_000)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert b"KeyboardInterrupt" in error
    assert child.returncode in (1, -signal.SIGINT)


def test_the_number_follows_torch_then_what_was_set(monkeypatch):
    monkeypatch.setattr(thread_count, "cpus", lambda: frozenset(range(8)))
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert hw.get_num_threads() == 3
        hw.set_num_threads(2)
        assert hw.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("said", "number"), [("3", 3), (" 2,4", 2), ("99", 8), ("0", 8), ("many", 8), ("", 8), (None, 8)]
)
def test_without_torch_the_environment_says_how_many(monkeypatch, said, number):
    monkeypatch.setattr(thread_count, "cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(thread_count, "_asked", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert hw.get_num_threads() == number
    assert ("OMP_NUM_THREADS says" in thread_count.why()) == (said in ("3", " 2,4", "99"))
    monkeypatch.setattr(thread_count, "_asked", 5)
    assert hw.get_num_threads() == 5


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_never_more_threads_than_cpus_this_process_may_run_on():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        hw.set_num_threads(7)
        assert hw.get_num_threads() == 1
        assert attention(1).shape == (1, 4, 257, 32)
    finally:
        os.sched_setaffinity(0, before)
    assert hw.get_num_threads() == min(7, len(before))


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ValueError, match="set_num_threads: n must be at least 1; got 0"):
        hw.set_num_threads(0)
    with pytest.raises(TypeError, match="set_num_threads: n must be an int or None; got float"):
        hw.set_num_threads(2.0)
