"""Decoding with KV in two memories: the hand-off between device and CPU, and the attention backend that uses it."""
