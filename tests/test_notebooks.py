"""The notebooks run, and show what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
SHOWN = {  # kinds of what each notebook's cells show, by how many
    "heads_of_a_sentence": {"image/pngiVBOR": 1, "<iframe": 1, "<table>": 3, "Watched: <b>BertModel</b>": 1},
    "one_layer": {"image/pngiVBOR": 1, "<figure": 2},
}


def test_each_is_known() -> None:
    assert sorted(SHOWN) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_it_runs_and_shows(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without what they showed once
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [kind + str(body) for output in outputs for kind, body in output.get("data", {}).items()]
    assert {what: sum(what in one for one in shown) for what in SHOWN[name]} == SHOWN[name]
