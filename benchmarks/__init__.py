"""The committed results, the pages that are written from them, and small experiments beside the benchmark. Run from the
checkout; none of it is installed. The benchmark itself is `strobe bench`."""
