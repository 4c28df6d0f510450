"""The ways in which providers are timed, by name. No torch here: the command line lists them in its help."""

from __future__ import annotations

TURNS, SUSTAINED, DO_BENCH = "turns", "sustained", "do_bench"

# Name -> what the documents and the report call it.
TITLES = {TURNS: "in short turns", SUSTAINED: "sustained", DO_BENCH: "by do_bench"}

SUMMARIES = {
    TURNS: "providers take turns of a few milliseconds, in changing orders; medians",
    SUSTAINED: "each provider alone until power and clock have settled, then for at least a second; means",
    DO_BENCH: "triton.testing.do_bench, provider after provider; medians",
}
METHODS = tuple(TITLES)
