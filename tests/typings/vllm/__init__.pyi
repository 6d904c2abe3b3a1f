# What kvclient.vllm reads of vLLM, which is not installed where types are checked. Real engines test that it is so.
