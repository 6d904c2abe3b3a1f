"""kvstore: the core of a tiered KV-cache store. No sockets, no argument parsing, no server live here."""

__version__ = "0.1.0"
