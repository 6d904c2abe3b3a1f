"""One engine process of the demo: holds a model, obeys requests that come as JSON lines over a socket.

    python -m demo.worker FD            FD: this process's end of a socket pair

Each request is an object with "do", answered by one object; {"error": text} says that it could not be done.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from demo.model import SMALL, load_model, prompt_tokens, write_model
from kvclient import Client
from kvclient.transformers import LoadedPrefix, PrefixCache
from kvstore.errors import CapacityError

_WARM_UP_TOKENS = 64


class FirstToken(BaseStreamer):
    """Notes when the first token was there. `generate` puts the prompt first, then each token."""

    def __init__(self) -> None:
        self.at = 0.0
        self._puts = 0

    def put(self, value: object) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Engine:
    """A model, and the store it shares KV through once `attach` was called."""

    def __init__(self) -> None:
        self._directory = Path()
        self._model: Any = None
        self._prefixes: PrefixCache | None = None

    def write(self, model: str) -> dict[str, Any]:
        """Write the demo's own model."""
        write_model(Path(model), SMALL)
        return {}

    def load(self, model: str) -> dict[str, Any]:
        """Load a model and compute a little with it, so that what is measured later is no first time."""
        self._directory = Path(model)
        self._model = load_model(self._directory)
        tokens = prompt_tokens(self._directory, self._model, _WARM_UP_TOKENS, seed=0)
        self._generate(tokens, 2, DynamicCache(config=self._model.config.get_text_config(decoder=True)))
        parameters = sum(weight.numel() for weight in self._model.parameters())
        return {"parameters": parameters, "threads": torch.get_num_threads()}

    def prompt(self, tokens: int, seed: int) -> dict[str, Any]:
        """Return a prompt of so many tokens."""
        return {"prompt": prompt_tokens(self._directory, self._model, tokens, seed)}

    def attach(self, socket: str, block_tokens: int) -> dict[str, Any]:
        """Share KV through the daemon at `socket` from now on. It need not run yet."""
        client = Client(socket, pretouch=True)
        self._prefixes = PrefixCache(client, self._model, block_tokens=block_tokens)
        namespace = self._prefixes.namespace
        return {"block_bytes": namespace.block_bytes, "namespace": namespace.digest.hex()}

    def generate(self, prompt: list[int], new_tokens: int, durable: bool = False) -> dict[str, Any]:
        """Generate greedily after `prompt`: with the store if one is attached, else all alone.

        The prompt's KV is stored afterwards; `durable` waits until it is on ssd.
        """
        began_at = time.perf_counter()
        if self._prefixes is None:
            loaded = LoadedPrefix(DynamicCache(config=self._model.config.get_text_config(decoder=True)), 0)
        else:
            loaded = self._prefixes.load(prompt)
        loaded_at = time.perf_counter()
        tokens, first_at, lead = self._generate(prompt, new_tokens, loaded.cache)
        answer: dict[str, Any] = {
            "tokens": tokens,
            "ttft_s": first_at - began_at,
            "load_s": loaded_at - began_at,
            "loaded_tokens": loaded.tokens,
            "failure": str(loaded.failure or ""),
            "lead": lead,
        }
        if self._prefixes is not None:
            saving_at = time.perf_counter()
            saved = self._prefixes.save(prompt, loaded.cache, durable=durable)
            answer |= {"save_s": time.perf_counter() - saving_at, "stored": saved.stored, "durable": saved.durable}
            if saved.failed:
                raise saved.failure or CapacityError(f"{saved.failed} of {len(saved)} blocks could not be stored")
        return answer

    def _generate(self, prompt: list[int], new_tokens: int, cache: DynamicCache) -> tuple[list[int], float, float]:
        """Return the tokens, when the first was there, and by how much of a logit the closest choice was made."""
        first = FirstToken()
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            streamer=first,
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(output.logits).topk(2).values
        lead = float((best[:, 0] - best[:, 1]).min())
        return output.sequences[0, len(prompt) :].tolist(), first.at, lead


def main() -> None:
    """Obey until the other end closes."""
    engine = Engine()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "write": engine.write,
        "load": engine.load,
        "prompt": engine.prompt,
        "attach": engine.attach,
        "generate": engine.generate,
    }
    with socket.socket(fileno=int(sys.argv[1])) as line, line.makefile("rw") as stream:
        for text in stream:
            request = json.loads(text)
            verb = verbs[request.pop("do")]
            try:
                answer = verb(**request)
            except Exception as exc:  # noqa: BLE001  # the demo reports it, and ends this process
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
