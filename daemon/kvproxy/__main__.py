"""`python -m kvproxy`: the same as the command kvproxy."""

import sys

from kvproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
