"""`python -m specjax`: the command `specjax`."""

import sys

from specjax.cli import main

sys.exit(main())
