"""Where blocks' bytes lie: one module a tier, and what tiers share."""
