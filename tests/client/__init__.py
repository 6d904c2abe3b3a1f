"""Tests of the client, most of them against the real daemon."""
