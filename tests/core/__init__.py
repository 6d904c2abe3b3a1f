"""Tests of the core's parts, one file a module: no daemon, no socket, a real memory tier of a few MiB."""
