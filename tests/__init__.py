"""The tests of kvstored; `make test` runs them."""
