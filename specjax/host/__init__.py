"""The host's side of an engine: who runs next, with which pages, slots and number of drafts.

Plain Python without arrays, and without JAX: what it plans is packed for the device elsewhere. It
never waits for the device. A plan is made while the step before is still running, so it counts on
every draft being accepted, and what was not is given back when the results are committed.
"""
