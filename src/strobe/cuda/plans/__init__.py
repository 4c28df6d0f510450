"""Each kernel has a module here, with its tiles, its limits, its plan and its variants."""
