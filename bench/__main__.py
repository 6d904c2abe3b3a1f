"""Every bench, one after the other: `python -m bench`. Each prints its own table; `--json` goes to each."""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("local", "lookup", "disk", "memory", "policy", "pool")


def main() -> int:
    """Run them all and return 1 if one failed."""
    failed = 0
    for name in BENCHES:
        print(f"bench.{name}", file=sys.stderr, flush=True)
        failed |= subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]], check=False).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
