"""Weights as values. Only these modules know how a weight is stored."""
