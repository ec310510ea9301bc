"""Formats of quantised weights: one module per format, and a line in `registry`."""
