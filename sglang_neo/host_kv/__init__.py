"""KV cache in host memory: how much, the memory, its pages, and the copies to and from the device's pool."""
