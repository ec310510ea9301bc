"""GPU operations for speculative decoding, one folder each, which do not depend on specjax.

Every folder has the equation and the argument checks (`__init__.py`), a plain JAX reference
(`reference.py`) that runs anywhere, and the hardware implementations.
"""

KERNELS = ("auto", "reference", "triton", "mosaic", "interpret")  # see `dispatch`
