"""What the workers run, in LLVM IR: so that handing them a job costs microseconds and never touches the GIL.

A job is an array of i64: [launches, then for each launch: function, arguments, next task, tasks, scratch, scratch
bytes a worker]. Workers take tasks from the counters; a task's result never depends on who took it.

The pool is an array of i64 (`SLOTS`). `state` is a job's number, an open bit and how many have joined it, in one
word, so that a worker who wakes late finds the job closed and goes back to sleep: nobody waits for it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from headwise.kernels.llvm import pause

# i64 slots; what different threads write lies on different cache lines
SLOTS = {"state": 0, "done": 8, "job": 16, "limit": 17, "stop": 18, "sleepers": 24, "mutex": 32, "condition": 48}
SIZE = 64
OPEN = 1 << 15
JOB = 1 << 16
SPINS = 2000  # some tens of microseconds
NAMES = ("headwise_pool_run", "headwise_pool_work", "headwise_pool_init", "headwise_pool_stop")

I32, I64, VOID, ADDRESS = ir.IntType(32), ir.IntType(64), ir.VoidType(), ir.PointerType()


class _Callee:
    """An address to call: llvmlite does not know what an opaque pointer points to."""

    def __init__(self, value: Any, function_type: Any) -> None:
        self.function_type, self.type, self.get_reference = function_type, value.type, value.get_reference


class _Function:
    """One function being written."""

    def __init__(self, module: ir.Module, name: str, arguments: int) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, [I64] * arguments), name)
        self.b = ir.IRBuilder(self.block())
        self.args = self.function.args

    def block(self) -> Any:
        return self.function.append_basic_block()

    def go(self, block: Any) -> None:
        if not self.b.block.is_terminated:
            self.b.branch(block)
        self.b.position_at_end(block)

    def address(self, base: Any, slot: Any) -> Any:
        offset = I64(8 * slot) if isinstance(slot, int) else self.b.mul(slot, I64(8))
        return self.b.inttoptr(self.b.add(base, offset), ADDRESS)

    def get(self, base: Any, slot: Any) -> Any:
        return self.b.load(self.address(base, slot), typ=I64)

    def put(self, x: Any, base: Any, slot: Any) -> None:
        self.b.store(x, self.address(base, slot))

    def shared(self, pool: Any, name: str) -> Any:
        return self.b.load_atomic(self.address(pool, SLOTS[name]), "seq_cst", 8, typ=I64)

    def change(self, op: str, pool: Any, name: str, x: int) -> Any:
        return self.b.atomic_rmw(op, self.address(pool, SLOTS[name]), I64(x), "seq_cst")

    def call(self, name: str, *args: Any) -> Any:
        f = self.module.globals.get(name)
        if f is None:
            f = ir.Function(self.module, ir.FunctionType(I32, [a.type for a in args]), name)
        return self.b.call(f, args)

    def mutex(self, pool: Any) -> Any:
        return self.address(pool, SLOTS["mutex"])

    def condition(self, pool: Any) -> Any:
        return self.address(pool, SLOTS["condition"])


def text() -> str:
    module = ir.Module("headwise_pool")
    execute = _execute(module)
    _run(module, execute)
    _work(module, execute)
    _init(module)
    _stop(module)
    return str(module)


def _execute(module: ir.Module) -> Any:
    """execute(job, worker): every launch of a job, one after the other; those who come first go on to the next."""
    f = _Function(module, "headwise_pool_execute", 2)
    f.function.linkage = "internal"
    job, worker = f.args
    entry, head, body, end = f.b.block, f.block(), f.block(), f.block()
    f.go(head)
    i = f.b.phi(I64)
    i.add_incoming(I64(0), entry)
    f.b.cbranch(f.b.icmp_signed("<", i, f.get(job, 0)), body, end)
    f.go(body)
    launch = f.b.add(job, f.b.mul(f.b.add(f.b.mul(i, I64(6)), I64(1)), I64(8)))
    kernel, arguments, total, scratch, size = (f.get(launch, slot) for slot in (0, 1, 3, 4, 5))
    mine = f.b.add(scratch, f.b.mul(worker, size))
    function = f.b.inttoptr(kernel, ADDRESS)
    kind = ir.FunctionType(VOID, [I64, I64, I64, I64])
    counter = f.b.add(launch, I64(16))
    f.b.call(_Callee(function, kind), [arguments, counter, total, mine])
    i.add_incoming(f.b.add(i, I64(1)), f.b.block)
    f.b.branch(head)
    f.b.position_at_end(end)
    f.b.ret_void()
    return f.function


def _run(module: ir.Module, execute: Any) -> None:
    """run(pool, job, helpers, busy): the caller works too, and returns when all who joined are done.

    The word at `busy` says whether the workers have a job. It is taken and given back here, where no signal's handler
    can come between.
    """
    f = _Function(module, NAMES[0], 4)
    pool, job, helpers, busy = f.args
    alone, free, shared = f.block(), f.block(), f.block()
    f.b.cbranch(f.b.icmp_signed("==", helpers, I64(0)), alone, free)
    f.b.position_at_end(free)
    pair = f.b.cmpxchg(f.address(busy, 0), I64(0), I64(1), "seq_cst", "seq_cst")
    f.b.cbranch(f.b.extract_value(pair, 1), shared, alone)
    f.b.position_at_end(alone)
    f.b.call(execute, [job, I64(0)])
    f.b.ret_void()

    f.b.position_at_end(shared)
    f.put(job, pool, SLOTS["job"])
    f.put(helpers, pool, SLOTS["limit"])
    f.put(I64(0), pool, SLOTS["done"])
    number = f.b.lshr(f.shared(pool, "state"), I64(16))
    opened = f.b.or_(f.b.shl(f.b.add(number, I64(1)), I64(16)), I64(OPEN))
    f.b.atomic_rmw("xchg", f.address(pool, SLOTS["state"]), opened, "seq_cst")
    wake, work = f.block(), f.block()
    f.b.cbranch(f.b.icmp_signed(">", f.shared(pool, "sleepers"), I64(0)), wake, work)
    f.b.position_at_end(wake)
    f.call("pthread_mutex_lock", f.mutex(pool))
    f.call("pthread_cond_broadcast", f.condition(pool))
    f.call("pthread_mutex_unlock", f.mutex(pool))
    f.go(work)
    f.b.call(execute, [job, I64(0)])
    closed = f.change("and", pool, "state", ~OPEN)
    joined = f.b.and_(closed, I64(OPEN - 1))
    head, wait, rest, end = f.block(), f.block(), f.block(), f.block()
    before = f.b.block
    f.go(head)
    spins = f.b.phi(I64)
    spins.add_incoming(I64(0), before)
    f.b.cbranch(f.b.icmp_signed("<", f.shared(pool, "done"), joined), wait, end)
    f.b.position_at_end(wait)
    pause(f.b)
    more = f.b.add(spins, I64(1))
    spins.add_incoming(more, f.b.block)
    f.b.cbranch(f.b.icmp_signed("<", more, I64(SPINS)), head, rest)
    f.b.position_at_end(rest)
    f.call("sched_yield")
    spins.add_incoming(more, f.b.block)
    f.b.branch(head)
    f.b.position_at_end(end)
    f.b.atomic_rmw("xchg", f.address(busy, 0), I64(0), "seq_cst")
    f.b.ret_void()


def _work(module: ir.Module, execute: Any) -> None:
    """work(pool): joins jobs until told to stop; waits awake for a moment, then asleep."""
    f = _Function(module, NAMES[1], 1)
    (pool,) = f.args
    last = f.b.alloca(I64)
    spins = f.b.alloca(I64)
    f.b.store(I64(0), last)
    again, look, idle, sleep, join, quit_ = (f.block() for _ in range(6))
    f.go(again)
    f.b.store(I64(0), spins)
    f.go(look)
    state = f.shared(pool, "state")
    ready, nothing = f.block(), f.block()
    new = f.b.icmp_signed("!=", f.b.lshr(state, I64(16)), f.b.load(last, typ=I64))
    is_open = f.b.icmp_signed("!=", f.b.and_(state, I64(OPEN)), I64(0))
    f.b.cbranch(f.b.and_(new, is_open), ready, nothing)

    f.b.position_at_end(ready)  # room for one more?
    count = f.b.and_(state, I64(OPEN - 1))
    full = f.block()
    f.b.cbranch(f.b.icmp_signed("<", count, f.get(pool, SLOTS["limit"])), join, full)
    f.b.position_at_end(full)
    f.b.store(f.b.lshr(state, I64(16)), last)
    f.b.branch(nothing)

    f.b.position_at_end(join)
    pair = f.b.cmpxchg(f.address(pool, SLOTS["state"]), state, f.b.add(state, I64(1)), "seq_cst", "seq_cst")
    joined = f.block()
    f.b.cbranch(f.b.extract_value(pair, 1), joined, again)
    f.b.position_at_end(joined)
    f.b.store(f.b.lshr(state, I64(16)), last)
    f.b.call(execute, [f.get(pool, SLOTS["job"]), f.b.add(count, I64(1))])
    f.change("add", pool, "done", 1)
    f.b.branch(again)

    f.b.position_at_end(nothing)
    f.b.cbranch(f.b.icmp_signed("!=", f.shared(pool, "stop"), I64(0)), quit_, idle)
    f.b.position_at_end(idle)
    pause(f.b)
    more = f.b.add(f.b.load(spins, typ=I64), I64(1))
    f.b.store(more, spins)
    f.b.cbranch(f.b.icmp_signed("<", more, I64(SPINS)), look, sleep)

    f.b.position_at_end(sleep)
    f.call("pthread_mutex_lock", f.mutex(pool))
    f.change("add", pool, "sleepers", 1)
    check, wait, awake = f.block(), f.block(), f.block()
    f.go(check)
    state = f.shared(pool, "state")
    new = f.b.icmp_signed("!=", f.b.lshr(state, I64(16)), f.b.load(last, typ=I64))
    is_open = f.b.icmp_signed("!=", f.b.and_(state, I64(OPEN)), I64(0))
    stop = f.b.icmp_signed("!=", f.shared(pool, "stop"), I64(0))
    f.b.cbranch(f.b.or_(f.b.and_(new, is_open), stop), awake, wait)
    f.b.position_at_end(wait)
    f.call("pthread_cond_wait", f.condition(pool), f.mutex(pool))
    f.b.branch(check)
    f.b.position_at_end(awake)
    f.change("sub", pool, "sleepers", 1)
    f.call("pthread_mutex_unlock", f.mutex(pool))
    f.b.branch(again)
    f.b.position_at_end(quit_)
    f.b.ret_void()


def _init(module: ir.Module) -> None:
    f = _Function(module, NAMES[2], 1)
    null = ir.Constant(ADDRESS, None)
    f.call("pthread_mutex_init", f.mutex(f.args[0]), null)
    f.call("pthread_cond_init", f.condition(f.args[0]), null)
    f.b.ret_void()


def _stop(module: ir.Module) -> None:
    """stop(pool): every worker returns."""
    f = _Function(module, NAMES[3], 1)
    (pool,) = f.args
    f.call("pthread_mutex_lock", f.mutex(pool))
    f.change("xchg", pool, "stop", 1)
    f.call("pthread_cond_broadcast", f.condition(pool))
    f.call("pthread_mutex_unlock", f.mutex(pool))
    f.b.ret_void()
