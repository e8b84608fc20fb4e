"""What a newcomer meets first: the import, the README, the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "why_many_heads.py"})


def python(*arguments: str, folder: Path) -> str:
    """What a fresh interpreter prints; its warnings are errors too."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_importing_headwise_imports_no_torch_and_no_compiler(tmp_path: Path) -> None:
    heavy = "torch transformers llvmlite click rich"
    said = python(
        "-c",
        f"import sys, headwise; print([name for name in {heavy!r}.split() if name in sys.modules])",
        folder=tmp_path,
    )
    assert said == "[]\n"


def test_using_the_op_on_numpy_arrays_imports_no_torch(tmp_path: Path) -> None:
    said = python(
        "-c",
        "import sys, numpy as np, headwise as hw; x = np.ones((1, 2, 3, 5)); "
        "hw.attention(x, x, x, mask=hw.causal(), weights=True)[1].read(entropy=True); "
        "print('torch' in sys.modules)",
        folder=tmp_path,
    )
    assert said == "False\n"


def test_the_map_is_complete_and_true() -> None:
    assert set(headwise.__all__) == {*headwise._MODULE, "nn"}
    for name in headwise._MODULE:
        assert getattr(headwise, name).__module__ == headwise._MODULE[name]
    assert dir(headwise) == sorted([*headwise.__all__, "__version__"])
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'atention'"):
        headwise.atention  # noqa: B018


def test_the_layer_is_there_without_an_import_of_its_own(tmp_path: Path) -> None:
    code = "import headwise as hw; print(hw.nn.MultiHeadAttention is hw.MultiHeadAttention, hw.nn.Heads.__name__)"
    assert python("-c", code, folder=tmp_path) == "True Heads\n"


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("watch", 'torch, which is not installed; run: pip install "torch>=2.9"'),
        ("nn", 'torch, which is not installed; run: pip install "torch>=2.9"'),
        ("KVCache", 'torch, which is not installed; run: pip install "torch>=2.9"'),
    ],
)
def test_a_name_whose_packages_are_missing_says_so_in_few_lines(name: str, needed: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; import headwise; headwise.{name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert lines[-1] == f"ModuleNotFoundError: headwise.{name}: needs {needed}"
    assert len(lines) < 10


def test_the_version_is_the_one_of_the_package() -> None:
    assert f'version = "{headwise.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_run(example: Path, tmp_path: Path) -> None:
    assert python(str(example), folder=tmp_path).count("\n") >= 3


def test_one_head_cannot_follow_two_relations_and_two_heads_can(tmp_path: Path) -> None:
    options = "--only", "two", "model", "--heads", "1", "2", "--seeds", "1"
    said = python(str(ROOT / "examples" / "why_many_heads.py"), *options, folder=tmp_path)
    one, two = re.findall(r"^ +([12]) +0 +(\d\.\d\d) +(\d\.\d\d) +(.*)$", said, re.M)
    assert one[0] == "1" and min(map(float, one[1:3])) < 0.3 and max(map(float, one[1:3])) > 0.97
    assert two[0] == "2" and min(map(float, two[1:3])) > 0.97
    assert {look.split()[0] for look in two[3].split(", ")} == {"previous", "marked"}
    assert "head 0.4 gives solved -> problem 0.89, and 0.03 from elsewhere" in " ".join(said.split())


def test_the_library_use_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 2
    python("-c", "".join(blocks), folder=tmp_path)
    assert (tmp_path / "heads.html").stat().st_size > 10_000


def test_the_links_in_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
