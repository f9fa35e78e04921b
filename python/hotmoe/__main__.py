"""`python -m hotmoe`: the same as the command `hotmoe`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
