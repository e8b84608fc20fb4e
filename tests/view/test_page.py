"""What the page shows, before it is packed: texts side by side, what was generated, both figures of a link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import zoo
from models.test_texts import Numbers
from view.pages import page, panel

import headwise as hw
from headwise.view.page import Page


def generated(prompt: list[int], new: int, **options: Any) -> Any:
    model, _ = zoo.llama()
    with hw.watch(model, Numbers()) as heads:
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            do_sample=False,
        )
    return heads


def test_what_was_generated_is_known_by_its_first_token() -> None:
    (found,) = Page.from_heads(generated([5, 6, 7, 8], 4)).panels
    assert (found.queries.generated, found.keys.generated) == (4, 4)
    assert len(found.queries.tokens) == 7  # the last token is never read
    (alone,) = Page.from_heads(generated([5, 6, 7, 8], 1)).panels
    assert alone.queries.generated is None


def test_padding_before_the_prompt_is_not_counted() -> None:
    model, _ = zoo.llama()
    ids, mask = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with hw.watch(model, Numbers()) as heads:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, pad_token_id=0, do_sample=False)
    (found,) = Page.from_heads(heads, batch=0).panels
    assert (found.queries.generated, len(found.queries.tokens)) == (2, 4)
    (found,) = Page.from_heads(heads, batch=1).panels
    assert found.queries.generated == 4


@pytest.mark.parametrize(
    ("texts", "titles"),
    [
        (["she thanked him", "she impressed him"], ["thanked", "impressed"]),
        (["a b c", "a c"], ["b", "the same text"]),
        (["same", "same"], ["the same text", "the same text"]),
        (["a " * 60, "b " * 60], [f"{'a ' * 19}a…", f"{'b ' * 19}b…"]),
    ],
)
def test_texts_side_by_side_are_named_by_what_differs(texts: list[str], titles: list[str]) -> None:
    pages = [page(replace(panel(1, 2, 5, 5), text=text)) for text in texts]
    assert [found.title for found in Page.beside(pages).panels] == titles
    assert Page.beside(pages[:1]) is pages[0]


def test_a_link_carries_both_figures_and_two_are_a_contrast() -> None:
    model, _ = zoo.bert()
    with torch.no_grad(), hw.watch(model, Numbers()) as heads:
        model(torch.tensor([[5, 6, 7, 8]]))
    (found,) = Page.from_heads(heads, [("w7", "w5"), ("w7", "w6")], model="tiny").panels
    links = heads.find(("w7", "w5"), ("w7", "w6"))
    for shown, link in zip(found.links, links, strict=True):
        assert [entry[:2] for entry in shown["ranking"]] == [list(entry[:2]) for entry in link.ranking[:12]]
        for entry, real in zip(shown["ranking"], link.ranking, strict=False):
            assert entry[2:] == [pytest.approx(real[2], abs=1e-5), pytest.approx(real.others, abs=1e-5)]
    (one,) = found.contrasts
    assert (one["source"], one["first"], one["second"]) == ("w7", "w5", "w6")
    assert found.text == "w5 w6 w7 w8"
