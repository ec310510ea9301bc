"""GPU operations for speculative decoding. They do not depend on specjax.

Each operation has a folder with its equation and argument checks (`__init__.py`), a reference in
plain JAX that runs on any device (`reference.py`), and its GPU kernels.
"""

KERNELS = ("auto", "reference", "triton", "interpret")  # see `dispatch`
