"""stand-in"""
from dataclasses import dataclass
import torch
from cpu_kernels.attention import HostPool
@dataclass(frozen=True)
class PoolGeometry:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int = 64
    def pages_for(self, b):
        return b // HostPool.bytes_needed(self.layers, 1, self.kv_heads, self.head_dim, self.dtype, self.page_tokens)
class HostKVPool:
    @staticmethod
    def create(g, pages, pin, threads):
        p = HostKVPool(); p.geometry=g; p.pages=pages; p.page_tokens=g.page_tokens
        p.bytes = HostPool.bytes_needed(g.layers, pages, g.kv_heads, g.head_dim, g.dtype, g.page_tokens)
        p.mem = torch.zeros(p.bytes, dtype=torch.uint8)
        p.kernel_pool = HostPool(p.mem, g.layers, pages, g.kv_heads, g.head_dim, g.dtype, g.page_tokens)
        return p
    def close(self): pass
