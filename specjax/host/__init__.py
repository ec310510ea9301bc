"""Decides on the host which requests run next, with which pages and how many drafts.

The code is plain Python without JAX. `engine/batch.py` packs the plans of this package for the
device. The host never waits for the device: a step is planned while the previous step is running.
So a plan assumes that every draft is accepted, and the pages of rejected drafts are freed when
results are committed.
"""
