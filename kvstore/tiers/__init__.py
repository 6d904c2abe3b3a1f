"""Where blocks live: one module a tier, one protocol for all."""
