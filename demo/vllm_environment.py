"""Where vLLM runs: the environment that requirements/engines.sh keeps, and what its processes are told by variables.

Nothing here imports vLLM: the demo, the bench and the tests run in the checkout's own .venv, and start engines as
processes of the other environment, which find kvclient in the checkout.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The first block's hash is chained to it; without one vLLM 0.28 and older draw a number at random.
HASH_SEED = "0"


class NoEnvironment(Exception):
    """vLLM can't be run; the text says why."""


def environment(name: str = "vllm-0.32") -> Path:
    """Return the directory of an environment; one that is missing is made first, which takes minutes and tells so."""
    made = subprocess.run(
        [ROOT / "requirements" / "engines.sh", name], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
    )
    if made.returncode:
        raise NoEnvironment(f"{name} could not be installed: see the messages above")
    return Path(made.stdout.decode().strip())


def python(environment: Path) -> str:
    """Return the interpreter of an environment."""
    return str(environment / "bin" / "python")


def variables(environment: Path, scratch: Path) -> dict[str, str]:
    """Return what engines are told: where the checkout's packages are, no network, one thread each, no compiler.

    vLLM's description of each model class is kept beside the environment, since making one takes it many seconds;
    all else that an engine writes goes to `scratch`.
    """
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "daemon", ROOT / "client"))),
        "PYTHONHASHSEED": HASH_SEED,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "TMPDIR": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torch"),
        "VLLM_CACHE_ROOT": str(environment / "cache"),
        "VLLM_CONFIG_ROOT": str(scratch / "config"),
        "VLLM_SERVER_DEV_MODE": "1",  # servers that can be told to empty their prefix caches
    }
