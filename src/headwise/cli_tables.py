"""The tables that the command line prints."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.heads.kinds import MEANING

HEADS_PER_LINK = 5
HEADS_PER_KIND = 4
TURNS = 0.05  # a head that gives each of two words so much more than the other turns from the one to the other
STRENGTH = {"broad": "breadth", "mixed": "peak"}  # what ranks the heads of these kinds; else the measure of that name


def link_table(found: list[Any], hidden: list[tuple[str, str]], rows: list[dict[str, Any]], between: str) -> Table:
    """The best heads for each link, with their weight, what other rows give the same word, and kind; and the links that
    the mask hides.
    """
    kinds = {(row["layer"], row["head"]): row["kind"] for row in rows}
    table = titled("Which heads carry each link", "link", "head", "weight", "elsewhere", "lift", "kind")
    for link in found:
        name = Text(f"{link.source} {between} {link.target}", style="bold")
        for entry in link.ranking[:HEADS_PER_LINK]:
            layer, head, weight = entry
            others = "none" if entry.others is None else f"{entry.others:.3f}"
            table.add_row(name, f"{layer}.{head}", f"{weight:.3f}", others, f"{entry.lift:+.3f}", kinds[layer, head])
            name = Text()
        table.add_section()
    for source, target in hidden:  # as from a word to a later one, in a model that only looks back
        table.add_row(Text(f"{source} {between} {target}", style="bold"), "none", "0", "", "", "no head can look there")
    return table


def contrast_table(one: Any, other: Any = None, changed: str = "") -> Table:
    """Two readings of a word against each other, and the same with the text changed."""
    difference = f"{one.first} - {one.second}"
    columns = [difference, "elsewhere", *([] if other is None else [f'with "{changed}"'])]
    title = f'"{one.source}": {one.first} or {one.second}? (first where that differs most from elsewhere)'
    table = titled(title, "head", one.first, one.second, *columns)
    there = {} if other is None else {(head.layer, head.head): head for head in other.heads}
    for head in one.heads[:HEADS_PER_LINK]:
        figures = [f"{head.first:.3f}", f"{head.second:.3f}", f"{head.leaning:+.3f}", f"{head.elsewhere:+.3f}"]
        figures += [] if other is None else [f"{there[head.layer, head.head].leaning:+.3f}"]
        table.add_row(f"{head.layer}.{head.head}", *figures)
    return table


def turning(one: Any, other: Any, changed: str) -> str:
    """How many heads turn from one reading to the other when the text changes, and the largest change."""
    there = {(head.layer, head.head): head for head in other.heads}
    both = [(head, there[head.layer, head.head]) for head in one.heads if (head.layer, head.head) in there]
    turned = [
        head
        for head, after in both
        if head.leaning * after.leaning < 0 and min(abs(head.leaning), abs(after.leaning)) >= TURNS
    ]
    head, after = max(both, key=lambda pair: abs(pair[1].leaning - pair[0].leaning))
    named = f": {', '.join(f'{x.layer}.{x.head}' for x in turned[:HEADS_PER_LINK])}" if turned else ""
    return (
        f'With "{changed}" {len(turned)} of {len(both)} heads turn from one to the other (by {TURNS} or more each '
        f"way){named}. The largest change is that of {head.layer}.{head.head}: {one.first} - {one.second} goes from "
        f"{head.leaning:+.3f} to {after.leaning:+.3f}."
    )


def kind_table(rows: list[dict[str, Any]]) -> Table:
    """The kinds, the most frequent first, each with the heads that show it best."""
    several = len({row["part"] for row in rows}) > 1
    by_kind = defaultdict(list)
    for row in rows:
        name = f"{row['part']} {row['layer']}.{row['head']}" if several else f"{row['layer']}.{row['head']}"
        by_kind[row["kind"]].append((-strength(row), name, row.get("mix", "")))
    table = titled("What kinds of heads there are", "kind", "heads", "strongest", "attends above all to")
    for kind, heads in sorted(by_kind.items(), key=lambda item: (-len(item[1]), item[0])):
        first, *rest = sorted(heads)[:HEADS_PER_KIND]
        best = ", ".join(name for _, name, _ in [first, *rest])
        mixed = f", as {first[1]}: {first[2]}" if kind == "mixed" and first[2] else ""
        table.add_row(Text(kind, style="bold"), str(len(heads)), best, MEANING[kind] + mixed)
    return table


def strength(row: dict[str, Any]) -> float:
    """How clearly a head is of its kind, in the text or on tokens said twice."""
    name = STRENGTH.get(row["kind"], row["kind"])
    return max(row.get(name) or 0.0, row.get(f"twice_{name}") or 0.0)


def titled(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")  # nothing is cut
    return table


def arrow(console: Console) -> str:
    return "→" if console.encoding.startswith("utf") else "->"
