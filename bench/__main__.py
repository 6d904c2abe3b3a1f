"""Every bench, one after the other: `python -m bench`. Each prints its own table; `--json` goes to each.

bench.vllm is not among them: it is run by name, since it needs an environment of 3 GB and makes it where it is not.
"""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("local", "lookup", "disk", "memory", "policy", "pool")
BY_NAME = ("vllm",)


def main() -> int:
    """Run them all and return 1 if one failed."""
    failed = 0
    for name in BENCHES:
        print(f"bench.{name}", file=sys.stderr, flush=True)
        failed |= subprocess.run([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]], check=False).returncode
    for name in BY_NAME:
        print(f"bench.{name} is run by name: {sys.executable} -m bench.{name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
