"""Layers of flash-attn that other libraries import: rotary embedding."""
