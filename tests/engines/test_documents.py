"""The programs in README.md and docs/transformers.md run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.daemon_fixture import running
from tests.product import ROOT

_MODEL = """
import pathlib, sys
from demo.model import TINY, write_model
MODEL = sys.argv[1]
write_model(pathlib.Path(MODEL), TINY)
class Tokenizer:
    @staticmethod
    def from_pretrained(name):
        import torch, types
        return lambda text, return_tensors: types.SimpleNamespace(input_ids=torch.tensor([list(map(ord, text))]))
import transformers
transformers.AutoTokenizer = Tokenizer  # the tiny model has none
"""


def programs(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def run(program: str, socket: Path, scratch: Path) -> str:
    environment = {**os.environ, "KVSTORED_SOCKET": str(socket), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torch")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(scratch / "model")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_s_example_in_the_readme_runs(short_dir: Path) -> None:
    (program,) = programs("README.md")
    with running(short_dir, ssd=None) as daemon:
        assert run(program, daemon.socket, short_dir) == "6 blocks stored\n6 blocks fetched\n"


def test_the_examples_for_transformers_run(short_dir: Path) -> None:
    program = "\n".join([_MODEL, *programs("docs/transformers.md")])
    with running(short_dir, ssd=None) as daemon:
        # 1,080 tokens and 32 new ones: the first program stores all full blocks, the second finds those of the prompt.
        assert run(program, daemon.socket, short_dir) == "1072 tokens loaded, 0 blocks stored, 69 were there\n"
