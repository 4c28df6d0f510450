"""Write the numbers of the documents from the committed results and from the code: `python -m benchmarks.pages`."""
