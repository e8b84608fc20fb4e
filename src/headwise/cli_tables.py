"""The tables that the command line prints."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

HEADS_PER_LINK = 5
HEADS_PER_KIND = 4
STRENGTH = {"broad": "breadth", "mixed": "peak"}  # what ranks the heads of these kinds; else the measure of that name
MEANING = {  # the same words as on the page
    "previous": "the token before",
    "next": "the token after",
    "self": "itself",
    "first": "the first token",
    "separator": "a separator",
    "duplicate": "the same token elsewhere",
    "induction": "what followed the same token before",
    "positional": "a fixed distance",
    "broad": "nearly everything alike",
    "mixed": "no one thing",
}


def link_table(found: list[Any], hidden: list[tuple[str, str]], rows: list[dict[str, Any]], between: str) -> Table:
    """The best heads for each link, with their weight and kind; and the links that the mask hides."""
    kinds = {(row["layer"], row["head"]): row["kind"] for row in rows}
    table = titled("Which heads carry each link", "link", "head", "weight", "kind")
    for link in found:
        name = Text(f"{link.source} {between} {link.target}", style="bold")
        for layer, head, weight in link.ranking[:HEADS_PER_LINK]:
            table.add_row(name, f"{layer}.{head}", f"{weight:.3f}", kinds[layer, head])
            name = Text()
        table.add_section()
    for source, target in hidden:  # as from a word to a later one, in a model that only looks back
        table.add_row(Text(f"{source} {between} {target}", style="bold"), "none", "0", "no head can look there")
    return table


def kind_table(rows: list[dict[str, Any]]) -> Table:
    """The kinds, the most frequent first, each with the heads that show it best."""
    several = len({row["part"] for row in rows}) > 1
    by_kind = defaultdict(list)
    for row in rows:
        name = f"{row['part']} {row['layer']}.{row['head']}" if several else f"{row['layer']}.{row['head']}"
        by_kind[row["kind"]].append((-(row.get(STRENGTH.get(row["kind"], row["kind"])) or 0.0), name))
    table = titled("What kinds of heads there are", "kind", "heads", "strongest", "attends above all to")
    for kind, heads in sorted(by_kind.items(), key=lambda item: (-len(item[1]), item[0])):
        best = ", ".join(name for _, name in sorted(heads)[:HEADS_PER_KIND])
        table.add_row(Text(kind, style="bold"), str(len(heads)), best, MEANING.get(kind))
    return table


def titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def arrow(console: Console) -> str:
    return "→" if console.encoding.startswith("utf") else "->"
