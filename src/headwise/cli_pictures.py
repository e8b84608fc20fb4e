"""`headwise look --svg FILE --head 5.10`: one head as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headwise.atomic import whole_file
from headwise.extras import missing, needed


def parse_head(_context: click.Context, _option: click.Parameter, head: str | None) -> tuple[int, int] | None:
    if head is None:
        return None
    layer, dot, number = head.partition(".")
    if not (dot and layer.isdecimal() and number.isdecimal()):
        raise click.ClickException(f"--head must be a layer and a head with a point between, as in 5.10; got {head!r}")
    return int(layer), int(number)


def check_pictures(pictures: dict[str, Path | None], head: tuple[int, int] | None) -> None:
    """Refuses what cannot be drawn before the model is loaded."""
    wanted = [f"--{kind}" for kind, path in pictures.items() if path]
    if wanted and head is None:
        raise click.ClickException(f"{wanted[0]} draws one head; say which, as in --head 5.10")
    if head is not None and not wanted:
        raise click.ClickException("--head goes with --svg FILE or --png FILE: it says which head is drawn")
    if wanted and missing("matplotlib"):
        raise click.ClickException(f"{wanted[0]} {needed('matplotlib')}")


def write_pictures(part: Any, pictures: dict[str, Path | None], head: tuple[int, int] | None) -> list[Path]:
    """Draws the head to each file, whole or not at all, and returns the files."""
    if head is None:
        return []
    layer, number = head
    if layer not in part.layers or number not in part.heads_of(layer):
        layers, heads = part.layers, part.heads_of(part.layers[0])
        raise click.ClickException(
            f"--head must be a layer from {layers[0]} to {layers[-1]} and a head from {heads[0]} to {heads[-1]}, "
            f"as in {layers[-1]}.{heads[0]}; got {layer}.{number}"
        )
    figure = part.plot(layer, number)
    written = []
    for kind, path in pictures.items():
        if path is not None:
            with whole_file(path) as file:
                figure.savefig(file, format=kind, dpi=150)
            written.append(path)
    return written
