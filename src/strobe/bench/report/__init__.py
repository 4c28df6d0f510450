"""The report: one HTML file with its data, its style and its script inside, readable from a disk without a server."""
