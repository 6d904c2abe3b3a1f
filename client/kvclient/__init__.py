"""The thin client that engines import."""
