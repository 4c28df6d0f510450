"""Masks, scores and dropout: what a call says about its scores. Nothing here knows a call or a kernel."""
