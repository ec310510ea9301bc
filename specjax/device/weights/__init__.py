"""Weights as values: only these modules know how a weight is stored."""
