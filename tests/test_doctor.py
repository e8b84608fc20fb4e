import headwise.doctor as doctor
from headwise.backends import compiled
from headwise.kernels import llvm


def test_says_what_is_in_use():
    found = dict(doctor.lines())
    assert found["kernels" if "kernels" in found else "instruction set"].startswith(llvm.chosen().isa)
    assert found["check"].startswith("right")
    assert "CPUs may be used" in found["threads"]
    assert found["bf16"] in ("multiplied in pairs", "widened to fp32 block by block")


def test_says_that_the_plain_backends_serve(monkeypatch):
    monkeypatch.setattr(compiled, "unavailable", lambda: "llvmlite cannot be imported (No module named 'llvmlite')")
    found = dict(doctor.lines())
    assert found["kernels"].startswith("off: llvmlite cannot be imported")
    assert "the plain backends serve" in found["kernels"]
    assert "check" not in found


def test_says_that_a_forced_instruction_set_cannot_run(monkeypatch):
    monkeypatch.setenv("HEADWISE_ISA", "sse9")
    llvm.chosen.cache_clear()
    try:
        found = dict(doctor.lines(check=False))
        assert found["kernels"].startswith("off: HEADWISE_ISA: must be an instruction set this machine can run")
    finally:
        monkeypatch.undo()
        llvm.chosen.cache_clear()
