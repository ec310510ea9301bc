"""Weights as values: what is here, and nothing else, knows how a weight is stored."""
