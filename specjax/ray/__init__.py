"""Replicas of an LLM in the processes of a Ray cluster."""
