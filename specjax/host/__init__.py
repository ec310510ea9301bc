"""The host's side of an engine: which requests run next, with which pages and how many drafts.

Plain Python without arrays, and without JAX: what it plans is packed for the device elsewhere. It
never waits for the device. A plan is made while the step before is still running, so it counts on
every draft being accepted, and the pages of rejected ones are freed when results are committed.
"""
