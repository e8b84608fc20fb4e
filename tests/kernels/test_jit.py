import hashlib
import os
import shutil
import stat
import subprocess
import sys
import warnings

import numpy as np
import pytest

from headwise.kernels import jit, llvm
from headwise.kernels.decode import Combine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "kernels"
    monkeypatch.setenv("HEADWISE_CACHE", str(path))
    jit._warn_once.cache_clear()
    return path


class Made:
    """Code that counts how often it is made."""

    def __init__(self, code=b"code"):
        self.code, self.times = code, 0

    def __call__(self):
        self.times += 1
        return self.code


def test_code_is_made_once_and_then_read(folder):
    make = Made()
    assert jit.cached("x", "avx2", make) == jit.cached("x", "avx2", make) == b"code"
    assert make.times == 1
    assert jit.cached("y", "avx2", make) and make.times == 2
    assert jit.cached("x", "portable", make) and make.times == 3


def test_only_the_owner_may_read_what_is_kept(folder):
    jit.cached("x", "avx2", Made())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


DAMAGE = ("cut", "changed", "emptied", "another's", "writable by others", "a folder", "a pipe", "a link to itself")


@pytest.mark.parametrize("damage", [*DAMAGE, "a device", "as large as a disk"])
def test_an_entry_that_is_not_whole_and_our_own_is_made_anew(folder, damage):
    make = Made(b"some code")
    jit.cached("x", "avx2", make)
    (entry,) = folder.iterdir()
    data = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(data[:-3])
    elif damage == "changed":
        entry.write_bytes(data[:-3] + b"abc")
    elif damage == "emptied":
        entry.write_bytes(b"")
    elif damage == "another's":
        code = b"evil code"
        entry.write_bytes(jit.MAGIC + b"k" * 32 + hashlib.sha256(code).digest() + code)
    elif damage == "writable by others":
        entry.chmod(0o666)
    elif damage == "as large as a disk":
        os.truncate(entry, 1 << 40)
    else:
        entry.unlink()
        {
            "a folder": entry.mkdir,
            "a pipe": lambda: os.mkfifo(entry, 0o600),
            "a link to itself": lambda: entry.symlink_to(entry),
            "a device": lambda: entry.symlink_to("/dev/zero"),
        }[damage]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if damage == "a folder" else "error")
        assert jit.cached("x", "avx2", make) == b"some code"
    assert make.times == 2
    if damage != "a folder":
        assert jit.cached("x", "avx2", make) == b"some code"
        assert make.times == 2


def test_a_folder_that_others_may_write_to_is_not_trusted(folder):
    folder.mkdir()
    folder.chmod(0o777)
    jit._folder.cache_clear()
    with pytest.warns(RuntimeWarning, match="others may write to"):
        assert jit.cached("x", "avx2", Made()) == b"code"
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file" / "kernels"))
    jit._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept between runs: cannot make"):
        assert jit.cached("x", "avx2", Made()) == b"code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.cached("y", "avx2", Made()) == b"code"


def test_a_folder_that_cannot_be_written_to_is_one_warning(folder, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.tempfile, "mkstemp", full)
    with pytest.warns(RuntimeWarning, match="cannot write to .*No space left on device"):
        assert jit.cached("x", "avx2", Made()) == b"code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.cached("x", "avx2", Made()) == b"code"


def test_an_empty_name_keeps_nothing(monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", "")
    make = Made()
    assert jit.cached("x", "avx2", make) == jit.cached("x", "avx2", make)
    assert make.times == 2


def test_the_default_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_folder() == tmp_path / "headwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_folder() == tmp_path / "home" / ".cache" / "headwise"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users here")
def test_a_user_without_a_home_is_one_warning(monkeypatch):
    import pwd

    def unknown(_):
        raise KeyError("no such user")

    for name in ("HEADWISE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for home in (None, ""):
        if home is not None:
            monkeypatch.setenv("HOME", home)
        jit._folder.cache_clear()
        jit._warn_once.cache_clear()
        with pytest.warns(RuntimeWarning, match="not kept between runs: cannot make .*(home directory|HOME is empty)"):
            assert jit.cached("x", "avx2", Made()) == b"code"
    jit._folder.cache_clear()


def test_a_folder_that_was_cleared_away_is_made_again(folder):
    assert jit.cached("x", "avx2", Made()) == b"code"
    shutil.rmtree(folder)
    make = Made()
    assert jit.cached("x", "avx2", make) == jit.cached("x", "avx2", make) == b"code"
    assert make.times == 1


def test_a_relative_name_stays_where_it_first_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWISE_CACHE", "kernels")
    jit._folder.cache_clear()
    found = jit.cache_folder()
    monkeypatch.chdir("/")
    assert found == jit.cache_folder() == tmp_path / "kernels"
    jit._folder.cache_clear()


def test_a_killed_compile_leaves_nothing_that_is_taken_for_code(folder):
    script = (
        "import os, signal; from headwise.kernels import jit\n"
        "real = os.replace\n"
        "os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "jit.cached('x', 'avx2', lambda: b'half')"
    )
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False)
    assert done.returncode == -9
    make = Made()
    assert jit.cached("x", "avx2", make) == b"code"
    assert make.times == 1


def test_several_processes_at_once(folder):
    script = (
        "from headwise.kernels import jit, llvm; from headwise.kernels.decode import Combine\n"
        "assert jit.function(Combine('f32', 13), llvm.chosen())"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [x.wait() for x in running] == [0] * 4
    assert len(list(folder.iterdir())) == 1


def test_a_new_source_makes_a_new_key(folder, monkeypatch):
    make = Made()
    jit.cached("x", "avx2", make)
    monkeypatch.setattr(jit, "_sources", lambda: "changed")
    jit.cached("x", "avx2", make)
    monkeypatch.setattr(jit, "_machine", lambda isa: "another machine")
    jit.cached("x", "avx2", make)
    assert make.times == 3


def test_a_function_is_loaded_once():
    geometry = llvm.chosen()
    spec = Combine("f32", 17)
    assert jit.function(spec, geometry) == jit.function(Combine("f32", 17), geometry)
    assert np.uint64(jit.function(spec, geometry)) > 0
