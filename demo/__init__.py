"""What kvstored is for, run before your eyes: `make demo`."""
