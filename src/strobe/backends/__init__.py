"""Backends compute attention: one module or package each, and `dispatch`, which chooses between them."""
