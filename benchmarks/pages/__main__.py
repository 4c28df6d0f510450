"""python -m benchmarks.pages            say what differs; exit 1 if anything does
python -m benchmarks.pages --write    bring everything up to date"""

import sys

from benchmarks.pages import documents, gallery, ladder_page, measured_page


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--write"]):
        raise SystemExit("usage: python -m benchmarks.pages [--write]")
    return max(page.main(arguments) for page in (measured_page, documents, gallery, ladder_page))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
