"""The vLLM connector under real engines and a real daemon: `make test-engines`."""
