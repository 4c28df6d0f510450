"""`strobe explain-page`. Only its arguments live here; what it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain_page(
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="The HTML file to write. Default: page.html here.")
    ] = Path("page.html"),
    show: Annotated[bool, typer.Option("--open", help="Open the file in the browser afterwards.")] = False,
) -> None:
    """Write the page that explains FlashAttention: one HTML file that needs no network.

    Example: `strobe explain-page --open`"""
    from strobe.learn import explain_page as page

    missing = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    try:
        written = page.build(out)
    except OSError as error:
        typer.echo(f"strobe: --out {out}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error
    if missing:
        typer.echo(f"made the folder {out.parent}", err=True)
    print(written)
    if show:
        import webbrowser

        webbrowser.open(written.resolve().as_uri())
