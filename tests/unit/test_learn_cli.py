"""The commands of the lessons: complete sentences in their help, and nothing that is asked for is ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strobe.tools.cli import UserError, app


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return " ".join(re.sub(r"[│╭╰╮╯─]", " ", result.output).split())


def test_the_example_explains_every_number() -> None:
    text = output("demo", "--example")
    for name in ("S", "m", "alpha", "P", "l", "O/l"):
        assert re.search(rf" {name} (?:the |e\^)[^.]{{15,}}", text), name
    assert "48 of 48 numbers agree" in text and "strobe explain-page --open" in text


@pytest.mark.parametrize(
    "others", [["--init", "ones"], ["--seq-len", "8", "--causal"], ["--print"], ["--dtype", "float16"]]
)
def test_the_example_does_not_ignore_other_options(others: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", "--example", *others])
    assert isinstance(result.exception, UserError)
    assert "--example has numbers of its own: leave out " in str(result.exception) and others[0] in str(
        result.exception
    )


@pytest.mark.parametrize("command", [["explain-page"], ["ladder"], ["ladder", "diff"]])
def test_help_is_in_sentences_with_an_example(command: list[str]) -> None:
    text = output(*command, "--help")
    assert re.search(r"[a-z]\. ", text)
    if command != ["ladder", "diff"]:
        assert "Example" in text and f"strobe {command[0]}" in text


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain-page", "-o", str(tmp_path / "taken" / "page.html")])
    assert result.exit_code == 0 and (tmp_path / "taken" / "page.html").is_file()
    assert f"made the folder {tmp_path / 'taken'}" in result.output.replace("\n", "")
    result = CliRunner().invoke(app, ["explain-page", "-o", str(tmp_path / "taken" / "page.html")])
    assert "made the folder" not in result.output
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["explain-page", "-o", str(tmp_path / "file" / "page.html")])
    assert result.exit_code == 2 and "--out" in result.output and "Traceback" not in result.output
