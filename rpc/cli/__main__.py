"""`python -m rpc.cli COMMAND`: as the installed program `persist`."""

from __future__ import annotations

import sys

from rpc.cli.program import main

sys.exit(main())
