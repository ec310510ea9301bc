"""The host side of an engine: decides which requests run next, with which pages and drafts.

Plain Python without JAX; `engine/batch.py` packs its plans for the device. It never waits for the
device. A step is planned while the previous one is running, so a plan assumes that every draft is
accepted; the pages of rejected drafts are freed when results are committed.
"""
