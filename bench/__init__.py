"""How close to the limits of the machine kvstored comes: `make bench`."""
