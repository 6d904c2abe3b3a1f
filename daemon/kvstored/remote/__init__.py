"""Remote stores: object stores and Redis behind the protocol of kvstore/tiers/remote.py."""
