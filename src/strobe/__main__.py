"""`python -m strobe` is `strobe`."""

from strobe.tools.cli import main

if __name__ == "__main__":
    main()
