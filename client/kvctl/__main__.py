"""`python -m kvctl`."""

import sys

from kvctl.cli import main

sys.exit(main())
