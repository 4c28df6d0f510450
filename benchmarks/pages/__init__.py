"""What the documents say in numbers, written from the committed results and from the code: `python -m benchmarks.pages`."""
