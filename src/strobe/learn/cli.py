"""`strobe explain-page`. Only its arguments live here; what it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain_page(
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="The file to write.")] = Path("page.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """A page on which one watches the algorithm run: one self-contained HTML file."""
    from strobe.learn import explain_page as page

    try:
        written = page.build(out)
    except OSError as error:
        typer.echo(f"strobe: --out {out}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error
    print(written)
    if show:
        import webbrowser

        webbrowser.open(written.resolve().as_uri())
