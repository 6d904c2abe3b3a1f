"""Who leaves a full tier: pure decisions that return victims."""
