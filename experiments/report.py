"""`python -m experiments.report RUN...`: one HTML page with every table and picture, and each of them as a file."""

from __future__ import annotations

import base64
import html
import io
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptspec.cli.outputs import write_output
from experiments.analysing import Results
from experiments.progress import cell
from experiments.store import RunFolder
from experiments.sweeps import find_experiment

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder for the page, pictures and tables.")
    ] = Path("report"),
    published: Annotated[
        list[Path] | None,
        typer.Option("--published", metavar="FILE", help="CSV of published figures; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is there already.")] = False,
) -> None:
    """Write index.html, self-contained, and beside it every picture as PNG and every table as CSV."""
    sections = [make_section(path, published or []) for path in runs]
    if out.exists() and any(out.iterdir()) and not force:
        raise FileExistsError(f"{out} already holds something; give another --out, or --force")
    out.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for section in sections:
        for name, content in section.files():
            assert name not in names
            names.add(name)
            write_output(out / name, content, force=True)
    page = write_output(out / "index.html", html_page(sections), force=True)
    typer.echo(f"wrote {page}, {len(names)} pictures and tables beside it", err=True)


@dataclass(frozen=True)
class Section:
    """What the report says of one run.

    Attributes:
        run: the folder's name, which begins the names of its files.
        manifest: of the run.
        intro: the experiment's README.
        rows: of all results, with their provenance.
        tables: by title.
        pictures: PNG by name.
        problems: configurations without a result.
        finished: configurations with one.
        seconds: that they took, on workers.
    """

    run: str
    manifest: dict[str, Any]
    intro: str
    rows: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    pictures: dict[str, bytes]
    problems: list[dict[str, Any]] = field(default_factory=list)
    finished: int = 0
    seconds: float = 0.0

    def files(self) -> list[tuple[str, bytes]]:
        """Pictures and tables by file name."""
        found = [(f"{self.run}-rows.csv", self.rows.to_csv(index=False).encode())]
        found += [(f"{self.run}-{name}.png", content) for name, content in self.pictures.items()]
        for title, table in self.tables.items():
            found.append((f"{self.run}-{slug(title)}.csv", table.to_csv(index=False).encode()))
        return found


def make_section(path: Path, published: list[Path]) -> Section:
    """The section of one run.

    Raises:
        FileNotFoundError: no run there.
    """
    folder = RunFolder.open(path)
    manifest = folder.manifest()
    experiment = find_experiment(manifest["experiment"])
    results = Results.of(folder, published)
    tables = {title: table for title, table in experiment.analysis.tables(results).items() if not table.empty}
    figures = experiment.analysis.plots(results)
    return Section(
        path.resolve().name,
        manifest,
        (experiment.folder / "README.md").read_text(encoding="utf-8"),
        results.frame,
        tables,
        {name: as_png(figure) for name, figure in figures.items()},
        folder.problems(),
        len(results.results),
        sum(result["seconds"] for result in results.results),
    )


def as_png(figure: Any) -> bytes:
    """A figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def slug(title: str) -> str:
    """A title as a part of a file name.

    >>> slug("Costs: cpu-fp32")
    'costs-cpu-fp32'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80]


# The page ------------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.text { text-align: left; }
th { background: #f4f4f4; } img { max-width: 100%; } pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; }
h1, h2 { border-bottom: 2px solid #4477aa; } .note { color: #555; }
"""


def html_page(sections: list[Section]) -> str:
    """All sections as one page that needs nothing besides itself."""
    links = "".join(
        f'<li><a href="#{html.escape(section.run)}">{html.escape(section.manifest["experiment"])}</a> '
        f"({html.escape(section.run)})</li>"
        for section in sections
    )
    parts = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>adaptspec experiments</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>adaptspec experiments</h1>\n<ul>{links}</ul>\n{parts}\n"
        "</body></html>\n"
    )


def _section(section: Section) -> str:
    manifest = section.manifest
    command = " ".join(manifest["sessions"][0]["argv"])
    lines = [
        f'<h2 id="{html.escape(section.run)}">{html.escape(manifest["experiment"])}: {html.escape(section.run)}</h2>',
        _intro(section.intro),
        "<h3>Reproduce it</h3>",
        f"<pre>{html.escape(command)}</pre>",
        f'<p class="note">{html.escape(_origin(section))}</p>',
    ]
    for title, table in section.tables.items():
        lines += [f"<h3>{html.escape(title)}</h3>", _table(table)]
    for name, content in section.pictures.items():
        data = base64.b64encode(content).decode()
        lines += [
            f"<h3>{html.escape(name)}</h3>",
            f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">',
        ]
    if section.problems:
        lines.append("<h3>Without a result</h3><table><tr><th>configuration</th><th>kind</th><th>reason</th></tr>")
        for problem in section.problems:
            cells = "".join(f'<td class="text">{html.escape(problem[k])}</td>' for k in ("id", "kind", "reason"))
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</table>")
    return "\n".join(lines)


def _origin(section: Section) -> str:
    manifest = section.manifest
    return (
        f"{section.finished} configurations, {section.seconds:.0f} s on workers; model {manifest['model']} in "
        f"{manifest['dtype']}, {manifest['prompts']['count']} prompts (sha256 {manifest['prompts']['sha256'][:12]}), "
        f"up to {manifest['max_new_tokens']} new tokens; begun {manifest['sessions'][0]['begun']}; "
        f"sessions: {len(manifest['sessions'])}. Every row of rows.csv carries commit, versions, host and device."
    )


def _intro(text: str) -> str:
    """The first paragraphs of a README as HTML: headings dropped, code and lists kept plain."""
    body = text.split("\n## ")[0].partition("\n")[2].strip()
    return "".join(f"<p>{html.escape(part)}</p>" for part in body.split("\n\n") if part.strip())


def _table(table: pd.DataFrame) -> str:
    head = "".join(f"<th>{html.escape(str(column))}</th>" for column in table.columns)
    rows = []
    for row in table.itertuples(index=False):
        cells = [
            f"<td>{html.escape(cell(value))}</td>"
            if isinstance(value, int | float)
            else f'<td class="text">{html.escape(cell(value))}</td>'
            for value in row
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def main() -> None:
    """The command; what goes wrong is one line on stderr."""
    try:
        app(standalone_mode=True)
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"experiments: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
