"""`python -m kvstored`: the same as the command kvstored."""

import sys

from kvstored.cli import main

if __name__ == "__main__":
    sys.exit(main())
