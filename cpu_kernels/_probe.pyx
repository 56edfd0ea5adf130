# cython: language_level=3
"""Streaming reads to measure memory with, and parallel filling. `cpu_kernels.probe` is the API."""

from libc.stdint cimport uint8_t, uintptr_t


cdef extern from "probe.hpp" namespace "cpu_kernels" nogil:
    cdef struct ReadVariant:
        const char* name
        const char* feature

    const int kMaxReadVariants
    int read_variants(ReadVariant* out)

    cdef cppclass CJob "cpu_kernels::Job":
        int items

    cdef cppclass CReadJob "cpu_kernels::ReadJob":
        CReadJob(const ReadVariant&, const uint8_t*, size_t, size_t) except +
        const CJob& job()
        size_t bytes()

    void run_on_threads(const CJob&, int) except +
    void c_fill "cpu_kernels::fill"(uint8_t*, size_t, const uint8_t*, size_t, int) except +


def variants():
    """[(name, CPU feature that it needs or "")], widest first."""
    cdef ReadVariant all[8]
    cdef int count = read_variants(all)
    return [(all[i].name.decode(), all[i].feature.decode()) for i in range(count)]


cdef class ReadJob:
    """One pass over memory. ``address`` is that of a ``cpu_kernels::Job``; the object must outlive its runs.

    The CPU must have what the variant needs, and the memory must be readable: neither can be checked here.
    """

    cdef CReadJob* native

    def __cinit__(self, int variant, address, bytes, chunk=1 << 18):
        cdef ReadVariant all[8]
        cdef int count = read_variants(all)
        if not 0 <= variant < count:
            raise ValueError(f"variant {variant} of {count}")
        if chunk < 1024 or chunk % 1024 or bytes < chunk or bytes // chunk > 0x7fffffff:
            raise ValueError(f"bytes must be at least one chunk and chunk a multiple of 1024, got {bytes} and {chunk}")
        if address == 0 or address % 8:
            raise ValueError("the address must be a multiple of 8 and not 0")
        self.native = new CReadJob(all[variant], <const uint8_t*><uintptr_t>address, bytes, chunk)

    def __dealloc__(self):
        del self.native

    @property
    def address(self):
        return <uintptr_t>&self.native.job()

    @property
    def bytes(self):
        """How many are read: whole chunks only."""
        return self.native.bytes()

    def run(self, int threads):
        """On the calling thread and ``threads`` - 1 more that live for this call."""
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        with nogil:
            run_on_threads(self.native.job(), threads)


def fill(address, bytes, pattern, pattern_bytes, int threads=1):
    """Copies of [pattern, pattern + pattern_bytes) all over [address, address + bytes), by several threads."""
    cdef uintptr_t to = address, source = pattern
    cdef size_t size = bytes, period = pattern_bytes
    if to == 0 or source == 0 or period == 0 or threads < 1:
        raise ValueError("addresses, pattern_bytes and threads must not be 0")
    with nogil:
        c_fill(<uint8_t*>to, size, <const uint8_t*>source, period, threads)
