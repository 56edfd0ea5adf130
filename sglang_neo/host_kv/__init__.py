"""KV cache in host memory. Today: how much memory there is to have."""
