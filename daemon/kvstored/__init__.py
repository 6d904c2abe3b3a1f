"""The daemon of one node: sockets, sessions and the loop around the core."""
