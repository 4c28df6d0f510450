"""The committed results, and the pages that are written from them. Run from the checkout; none of it is installed. The
benchmark itself is `strobe bench`."""
