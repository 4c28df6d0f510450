"""A call is bound to a backend, remembered, differentiated and traced. `attend` is the one way in."""
