"""Prefill of prompts whose KV goes to host memory: layer by layer through a staging region on the device.

The region holds one layer's keys and values of whole prompts. It has slot numbers of its own, which mean the same
tokens in every layer: while such a forward runs, they stand in the prompts' lines of ``req_to_token`` and in
``out_cache_loc``, and SGLang's KV pool shows the region's tensors in the place of every layer's. So any attention
backend that finds KV by slot works on it as it is. Per layer, all in the forward's own stream:

    bring     the tokens before this part of the prompt come in, from host pages or from the device's prefix cache
    (the user's attention backend writes the new keys and values into the region and attends)
    take      the new tokens leave for host pages

One region for all layers is enough: a layer's keys and values have been packed for the bus (``host_kv/transfer.py``)
before the next layer's are written, in stream order, and only packed ones wait for the bus, in buffers that transfers
share. The bus works beside the layers: Python runs ahead of the device, so pages of later layers are on their way while
one computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sglang_neo.host_kv.device_pool import DeviceKV
from sglang_neo.host_kv.transfer import KVTransfer, Transfer
from sglang_neo.token_manager import HostRow, PromptPart


class HostPrefill:
    """Owns the staging region.

    Args:
        pool: SGLang's KV pool, an MHATokenToKVPool.
        device: its buffers.
        transfer: between them and the host pool.
        tokens: that the region is to hold; whole device pages.
        page_size: of a device page.
    """

    def __init__(self, pool: Any, device: DeviceKV, transfer: KVTransfer, tokens: int, page_size: int):
        self._pool, self._device = pool, device
        self.tokens = -(-tokens // page_size) * page_size
        # As in SGLang's pool, page 0 is nobody's.
        shape = (page_size + self.tokens, *device.k[0].shape[1:])
        self.k = torch.zeros(shape, dtype=device.dtype, device=device.device)
        self.v = torch.zeros_like(self.k)
        self.layers = len(device.k)
        self.transfer = transfer.over([self.k] * self.layers, [self.v] * self.layers)
        #: What the attention backend hands layers to while such a forward runs.
        self.current: PromptLayers | None = None

    @property
    def bytes(self) -> int:
        """Device memory of the region."""
        return 2 * self.k.numel() * self.k.element_size()

    @contextlib.contextmanager
    def running(self, rows: Sequence[HostRow], lines: Sequence[int], req_to_token: torch.Tensor) -> Iterator[None]:
        """Around the forward of a batch of such prompts, with the stream current that it runs on.

        Args:
            rows: of the batch, each with its ``part``.
            lines: theirs in ``req_to_token``, which are zero before and after.
            req_to_token: SGLang's, int32 [requests, tokens].

        Raises:
            RuntimeError: the attention of a layer did not come by.
        """
        parts = [row.part for row in rows if row.part is not None]
        assert len(parts) == len(rows)
        for line, part in zip(lines, parts, strict=True):
            end = part.first_slot + part.end
            req_to_token[line, : part.end] = torch.arange(
                part.first_slot, end, dtype=req_to_token.dtype, device=req_to_token.device
            )
        layers = self.current = PromptLayers(self, rows, parts)
        try:
            with self._in_place_of_the_pool():
                yield
        finally:
            self.current = None
            for line in lines:
                req_to_token[line].zero_()
        if layers.taken != self.layers:
            raise RuntimeError(f"a prefill to host memory took {layers.taken} of {self.layers} layers")
        for row in rows:
            row.arrival = layers.transfer

    @contextlib.contextmanager
    def _in_place_of_the_pool(self) -> Iterator[None]:
        pool = self._pool
        own = pool.k_buffer, pool.v_buffer, pool.size
        pool.k_buffer, pool.v_buffer, pool.size = [self.k] * self.layers, [self.v] * self.layers, self.tokens
        try:
            yield
        finally:
            pool.k_buffer, pool.v_buffer, pool.size = own

    def copy_from_device(self, layer: int, source: torch.Tensor, slots: torch.Tensor) -> None:
        """Tokens of a layer in the device pool's slots ``source`` into the region's ``slots``, both int64 [tokens]."""

        def copy() -> None:
            for region, own in ((self.k, self._device.k[layer]), (self.v, self._device.v[layer])):
                region.index_copy_(0, slots, own.index_select(0, source))

        self.transfer.device.current().run(copy)


class PromptLayers:
    """What goes in and out of the region in each layer of one forward: the same tokens in all of them.

    Attributes:
        taken: layers whose new tokens are on their way.
        transfer: of the last of them.
    """

    def __init__(self, owner: HostPrefill, rows: Sequence[HostRow], parts: Sequence[PromptPart]):
        self._owner = owner
        device, page = owner.k.device, owner.transfer.pool.geometry.page_tokens
        self.taken = 0
        self.transfer: Transfer | None = None

        def span(begin: int, end: int) -> torch.Tensor:
            return torch.arange(begin, end, dtype=torch.int64, device=device)

        def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(tensors) if tensors else span(0, 0)

        into: list[torch.Tensor] = []
        self._in_pages: list[int] = []
        cached: list[torch.Tensor] = []
        into_cached: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        self._out_pages: list[int] = []
        # A copy may end within a page only at its end. Only a prompt that goes on in chunks has such a prefix.
        for row, part in sorted(zip(rows, parts, strict=True), key=lambda pair: pair[1].prefix % page):
            prefix = span(part.first_slot, part.first_slot + part.prefix)
            if part.device_prefix is not None:
                if part.device_prefix.is_cuda:  # made in the scheduler's stream, which may drop it before it is read
                    part.device_prefix.record_stream(torch.cuda.current_stream())
                cached.append(part.device_prefix)
                into_cached.append(prefix)
                first = row.cached_pages
            else:
                assert sum(map(len, into)) % page == 0, "two prefixes end within a page"
                into.append(prefix)
                self._in_pages += row.pages[: -(-part.prefix // page)]
                first = part.prefix // page  # a page that is begun is written again as a whole
            pages = row.pages[first : -(-part.end // page)]
            new = span(part.first_slot + first * page, part.first_slot + part.end)
            out.append(torch.nn.functional.pad(new, (0, len(pages) * page - len(new))))
            self._out_pages += pages
        self._in_slots, self._out_slots = joined(into), joined(out)
        self._cached, self._cached_slots = joined(cached), joined(into_cached)

    def bring(self, layer: int) -> None:
        """Before a layer's attention."""
        owner = self._owner
        if len(self._cached):
            owner.copy_from_device(layer, self._cached, self._cached_slots)
        if self._in_pages:
            owner.transfer.to_device(self._in_pages, self._in_slots, layers=range(layer, layer + 1))

    def take(self, layer: int) -> None:
        """After it."""
        assert layer == self.taken, f"attention of layer {layer} follows that of layer {self.taken - 1}"
        layers = range(layer, layer + 1)
        self.transfer = self._owner.transfer.to_host(self._out_slots, self._out_pages, layers=layers)
        self.taken += 1
