"""The P/D proxy: one OpenAI-compatible door in front of prefill and decode workers that share a kvstored."""
