"""Modules of attention, and rotary position embedding."""

from strobe.nn import rotary

__all__ = ["rotary"]
